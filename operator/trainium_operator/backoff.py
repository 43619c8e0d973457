"""Compute pauses that double with each failure in a row."""

from __future__ import annotations


def compute_backoff(first_seconds: float, max_seconds: float, failures: int) -> float:
    """Return the pause in seconds after this many failures in a row, from 1: the first, doubled by each further one."""
    return min(max_seconds, first_seconds * 2.0 ** min(failures - 1, 32))
