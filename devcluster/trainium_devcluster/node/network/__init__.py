"""Provide the addresses, names and connections of pods."""
