"""Decide which pods and budgets exist, on which nodes, all at once or none."""
