"""Reconcile the memory of bad machines over all jobs."""
