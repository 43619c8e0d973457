"""The models that can be trained: their numbers, their parameters, and their families; no torch."""
