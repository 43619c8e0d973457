"""Implement the optional features, each in a file or folder that can be deleted with its line of `registry`."""
