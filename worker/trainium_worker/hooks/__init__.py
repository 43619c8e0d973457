"""Report to the agent from the loops of `transformers`, Lightning and torchtitan, and from a plain loop."""
