"""Failures of checkpoints: a sentence for a person; the base classes carry the exit code of the contract."""

from __future__ import annotations

import errno

from trainium_trainer.exits import PeerLostError, StorageError, UserError
from trainium_trainer.write_access import FORBIDDEN, FULL, explain_forbidden

__all__ = [
    "DamagedFileError",
    "StaleGenerationError",
    "StorageError",
    "TooSlowError",
    "UnusableCheckpointError",
    "is_transient",
    "storage_error",
]

_NOT_A_FOLDER = frozenset({errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG})
_LASTING = FORBIDDEN | _NOT_A_FOLDER | {errno.EFBIG, errno.ENOENT, errno.EISDIR, errno.ENODEV}


class StaleGenerationError(PeerLostError):
    """A newer start of the run owns this folder: this process is a leftover and must not write."""


class DamagedFileError(Exception):
    """A file is missing, ends too early or has other contents than were written: trying again does not cure it."""


class TooSlowError(StorageError):
    """A save that does not end: it cannot be called back, so there is no other save to hope for in this process."""


class UnusableCheckpointError(UserError):
    """The checkpoints that are there cannot be continued by this configuration; a person must decide."""


def is_transient(error: OSError) -> bool:
    """Return whether trying again may help: a full disk or a network fault may pass, a missing permission does not."""
    return error.errno not in _LASTING


def storage_error(error: OSError, where: str) -> StorageError:
    """Return the sentence for an I/O error: what, where, what to do."""
    if error.errno in FULL:
        advice = "the store is full (or a file-size limit was hit): free space, raise the limit or lower keepLast"
    elif error.errno in FORBIDDEN:
        advice = f"{explain_forbidden(error.errno, where)}, or choose another checkpoint.path"
    elif error.errno == errno.ENODEV:
        advice = "make the bucket, or choose another checkpoint.path"
    elif error.errno == errno.ETIMEDOUT:
        advice = "look at the network and at the store"
    elif error.errno in _NOT_A_FOLDER:
        advice = "the path is not a usable folder: choose another checkpoint.path"
    else:
        advice = "check the store behind checkpoint.path"
    return StorageError(f"checkpoint storage {where}: {error.strerror or error}: {advice}")
