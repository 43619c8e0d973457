"""The controller of a job (`spec.managedBy`), as in batch/v1 Job and JobSet."""

from __future__ import annotations

MANAGER = "trainium.dev/trainium-operator"
"""The value that means this operator; no value means it too."""
MAX_MANAGER = 63


def is_managed_here(managed_by: object) -> bool:
    """Return whether this operator manages a job with this value of `managedBy`."""
    return managed_by in (None, "", MANAGER)
