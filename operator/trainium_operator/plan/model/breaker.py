"""How much may go wrong at once before that says more about the observer than about what is observed."""

from __future__ import annotations

CAP = 0.2
"""Part of a fleet, or of a job's workers, that may be bad at once."""


def cap_of(size: int) -> int:
    """How many of so many may be bad at once, or in quarantine; always one."""
    return max(1, int(size * CAP))
