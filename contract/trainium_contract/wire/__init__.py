"""What one program writes and another reads: messages, environment, records, the manifest of a checkpoint."""
