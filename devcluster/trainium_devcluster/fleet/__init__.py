"""Simulate many nodes with kwok."""
