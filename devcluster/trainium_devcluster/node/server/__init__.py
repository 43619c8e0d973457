"""Serve the API server's requests (logs and exec)."""
