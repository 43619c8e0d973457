"""Decide what the ranks of a job are: the built-in trainer, or any other program. All else is the same for both."""
