"""Check a node and a pair of nodes by computation, in processes that the agent starts before ranks."""
