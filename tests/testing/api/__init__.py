"""Who answers as an API server? One in memory, the same over HTTP, a Kueue beside it, and what real jobs left."""
