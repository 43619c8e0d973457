"""The parts of `spec` of a TrainingJob; `trainer` has the trainer's configuration."""
