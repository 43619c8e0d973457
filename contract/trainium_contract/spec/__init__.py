"""What people write in `spec` of a TrainingJob, one part a file; the trainer's configuration is in `trainer`."""
