"""Listening sockets, connection limits, tokens and their reviews, certificates."""
