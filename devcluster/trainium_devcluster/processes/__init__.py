"""Processes that end with their supervisor, and what is left of those that did not."""
