"""Measure costs as ratios to a floor (`python -m benchmarks.run`), and prove recovery and parity."""
