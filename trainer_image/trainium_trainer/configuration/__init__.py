"""Turn a written configuration into a checked one, or into one sentence about what is wrong."""
