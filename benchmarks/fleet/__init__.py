"""Measure the cost of operator and coordinator at fleet size, on fake nodes, relative to a floor and to peers."""
