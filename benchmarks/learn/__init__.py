"""Proof that it learns: `python -m benchmarks.learn`."""
