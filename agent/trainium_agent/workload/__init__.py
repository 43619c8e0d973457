"""Define what the ranks of a job run: the built-in trainer, or any other program."""
