"""Listening sockets, limits of connections, tokens and their reviews, certificates."""
