"""How the operator talks to the API server: connections, errors, kinds, retries."""
