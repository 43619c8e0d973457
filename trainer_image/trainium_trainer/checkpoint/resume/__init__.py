"""The start of a run: the state that the ranks agree on, and how each gets its part."""
