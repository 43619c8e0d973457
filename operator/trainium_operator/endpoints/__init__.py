"""Probes, metrics and pages of jobs, for readers whom the API server authorises."""
