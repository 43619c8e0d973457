"""Addresses, names and connections of pods."""
