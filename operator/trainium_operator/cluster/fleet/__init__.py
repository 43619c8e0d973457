"""The memory of bad machines, reconciled over all jobs."""
