"""The contents of a checkpoint root, its owner, and who may commit there."""
