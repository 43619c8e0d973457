"""What leaves the trainer: models in the form that other programs read."""
