"""The controller of a job (`spec.managedBy`), as batch/v1 Job and JobSet have it."""

from __future__ import annotations

MANAGER = "trainium.dev/trainium-operator"
"""The value that means this operator; no value means it too."""
MAX_MANAGER = 63


def is_managed_here(managed_by: object) -> bool:
    """Return whether a value of `managedBy` leaves the job to this operator."""
    return managed_by in (None, "", MANAGER)
