"""What the operator writes in `status` of a TrainingJob, as far as it is more than a field."""
