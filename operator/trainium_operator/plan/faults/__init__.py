"""Classify what is wrong with a process, a pod or a node by the contract's table of faults; count budgets."""
