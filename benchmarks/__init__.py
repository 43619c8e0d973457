"""What things cost and how long they take, as ratios to a floor: `python -m benchmarks.run`, and one room a subject."""
