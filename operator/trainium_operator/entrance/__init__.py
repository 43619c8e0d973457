"""Who is let in: listening sockets, connections, tokens and what the API server says of them, certificates."""
