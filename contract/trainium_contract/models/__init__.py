"""The models that can be trained: their numbers, their parameters, and the families that they belong to; no torch."""
