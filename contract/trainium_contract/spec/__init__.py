"""The parts of `spec` of a TrainingJob; the trainer's configuration is in `trainer`."""
