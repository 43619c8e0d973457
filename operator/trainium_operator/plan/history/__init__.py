"""What is being recovered from: interruptions, opened once, counted once, closed once."""
