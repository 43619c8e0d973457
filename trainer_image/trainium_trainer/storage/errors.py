"""Classify failures of folders and buckets, and explain each with a remedy."""

from __future__ import annotations

import errno

from trainium_contract.worker_process.write_access import FORBIDDEN, FULL, explain_forbidden
from trainium_trainer.exits import StorageError

__all__ = ["DamagedFileError", "StorageError", "create_storage_error", "is_transient"]

_NOT_A_FOLDER = frozenset({errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG})
_LASTING = FORBIDDEN | _NOT_A_FOLDER | {errno.EFBIG, errno.ENOENT, errno.EISDIR, errno.ENODEV}


class DamagedFileError(Exception):
    """A file is missing, truncated or has other contents than were written: a retry does not help."""


def is_transient(error: OSError) -> bool:
    """Return whether a retry may help: a full disk or a network fault may pass, a missing permission does not."""
    return error.errno not in _LASTING


def create_storage_error(error: OSError, location: str) -> StorageError:
    """Return the error for an I/O error, with cause, location and remedy."""
    if error.errno in FULL:
        advice = "the store is full (or a file-size limit was hit): free space, raise the limit or lower keepLast"
    elif error.errno in FORBIDDEN:
        advice = f"{explain_forbidden(error.errno, location)}, or choose another checkpoint.path"
    elif error.errno == errno.ENODEV:
        advice = "make the bucket, or choose another checkpoint.path"
    elif error.errno == errno.ETIMEDOUT:
        advice = "look at the network and at the store"
    elif error.errno in _NOT_A_FOLDER:
        advice = "the path is not a usable folder: choose another checkpoint.path"
    else:
        advice = "check the store behind checkpoint.path"
    return StorageError(f"checkpoint storage {location}: {error.strerror or error}: {advice}")
