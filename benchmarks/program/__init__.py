"""Benchmarks of training programs other than the built-in trainer."""
