"""The contents of a checkpoint root, its owner, and the right to commit there."""
