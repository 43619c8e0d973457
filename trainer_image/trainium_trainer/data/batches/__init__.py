"""The samples of each step and their order."""
