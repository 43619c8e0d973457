"""Report to the agent from loops of others: `transformers`, Lightning, torchtitan; and a loop for a bare script."""
