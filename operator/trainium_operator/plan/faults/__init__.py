"""Classify the problems of processes, pods and nodes by the contract's table of faults; count budgets."""
