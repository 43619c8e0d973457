"""Raise the limit of open files of this process, and read the limit for the checks.

Guarantees:
- Only the soft limit is changed, and only upwards.
- Children inherit it.
"""

from __future__ import annotations

import resource


def raise_limit() -> int:
    """Raise the soft limit to the hard one and return the new limit; negative for none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # a hard limit above the kernel's own, or a sandbox that forbids it
        return soft
    return hard


def read_limit() -> int:
    """Return the hard limit; negative for none."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
