"""Kubernetes I/O: everything that reads from or writes to the API server."""
