"""Compare speed and memory of the trainer with `transformers.Trainer`: `python -m benchmarks.training_speed`."""
