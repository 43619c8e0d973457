"""What does a run begin with? Files, models, a hub and an S3 that answer on loopback."""
