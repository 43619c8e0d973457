"""What the node answers: the API server for logs and exec, and its control socket."""
