"""Evaluate a model: generate answers, and compare its figures with those of its base."""
