"""Compute the requirements of a job on a machine from the sizes of model and world: memory, open files."""
