"""Measure what operator and coordinator cost at fleet size, on fake nodes, compared with a floor and with others."""
