"""Check a node and a pair of nodes by computing: processes that the agent starts before ranks."""
