"""What checkpoints, artifacts and data add to training, on one machine."""
