"""Explain errors of the store of artifacts."""

from __future__ import annotations

from trainium_contract.worker_process.write_access import FORBIDDEN, FULL, explain_forbidden
from trainium_trainer.exits import StorageError


def unwritable_error(error: OSError, where: str) -> StorageError:
    """Return the error for an artifact that cannot be written."""
    if error.errno in FULL:
        advice = "free space and start again, what is complete is not written again"
    elif error.errno in FORBIDDEN:
        advice = f"{explain_forbidden(error.errno, where)}, or name another place"
    else:
        advice = "look at the store and start again, what is complete is not written again"
    return StorageError(f"artifact {where}: cannot be written ({error.strerror or error}): {advice}")
