"""Answer the API server (logs and exec) and the control socket."""
