"""Experiment trackers: a process of rank 0 sends metrics.jsonl to MLflow or Weights & Biases."""
