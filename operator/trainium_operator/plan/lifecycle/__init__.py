"""The states of a job besides training: suspended, complete, failed, deleted after its TTL."""
