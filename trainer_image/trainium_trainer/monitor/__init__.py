"""What is recorded while training: progress for the agent, metrics and samples for people."""
