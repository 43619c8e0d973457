"""Which pods and budgets there should be, on which nodes, all at once or none."""
