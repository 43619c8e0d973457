"""Conversion from and to the checkpoints of neuronx-distributed (NxD)."""
