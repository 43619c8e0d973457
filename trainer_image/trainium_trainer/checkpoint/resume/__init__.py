"""How a run starts: which state the ranks agree on, and how each gets its part."""
