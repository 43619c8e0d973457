"""Records of a run: progress for the agent, metrics and samples for users."""
