"""Speed and memory of the trainer beside `transformers.Trainer`: `python -m benchmarks.training_speed`."""
