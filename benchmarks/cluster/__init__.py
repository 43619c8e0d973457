"""What a development cluster waits for: itself, a first step, a recovery."""
