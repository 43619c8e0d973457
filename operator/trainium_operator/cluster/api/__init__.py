"""The client of the API server: connections, errors, kinds, retries."""
