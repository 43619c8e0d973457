"""Experiment trackers: a process beside rank 0 sends metrics.jsonl to MLflow, Weights & Biases or Trackio."""
