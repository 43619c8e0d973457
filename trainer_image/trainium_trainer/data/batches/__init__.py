"""Which samples a step sees, in which order, and how a rank gets its own ahead of the step."""
