"""Connect to an API server: kubeconfig files, and HTTPS with the standard library."""
