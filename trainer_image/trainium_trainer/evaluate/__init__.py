"""Evaluate a model: generated answers, and its figures beside those of its base."""
