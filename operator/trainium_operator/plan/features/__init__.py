"""Implement the optional features, each in one folder that can be deleted with its line of `registry`."""
