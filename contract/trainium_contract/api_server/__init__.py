"""Connect to an API server with the official `kubernetes` library (extra `kubernetes`)."""
