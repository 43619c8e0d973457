"""Rows of the fault table, by what goes wrong."""
