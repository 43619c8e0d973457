"""Execution of plans, and the limits of their writes."""
