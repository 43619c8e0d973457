"""Show that a model learns: `python -m benchmarks.learn`."""
