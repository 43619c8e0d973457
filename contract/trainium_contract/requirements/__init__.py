"""What a job needs of a machine, from the sizes of model and world: memory, open files."""
