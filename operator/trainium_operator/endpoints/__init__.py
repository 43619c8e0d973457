"""Probes, metrics and pages of jobs, for readers that the API server authorizes."""
