"""API servers for tests: one in memory, the same over HTTP, a Kueue beside it, and records of real jobs."""
