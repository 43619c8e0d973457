"""Explain why a path cannot be written: the error, the user and the remedy.

A worker runs as an ordinary user (1000 by default). A volume gets the pod's fsGroup if its driver supports that; a
`hostPath` never does (docs/install.md), so the most frequent cause is a folder owned by root.
"""

from __future__ import annotations

import errno
import os

from trainium_contract.trainer.addresses import is_address

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of missing space: the disk, a quota or the limit of the file size."""
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Errors of missing permission; a retry does not help."""


def explain_forbidden(number: int | None, where: object = "") -> str:
    """Return the cause and the remedy for an errno of `FORBIDDEN`; `where` is a bucket or a folder."""
    if is_address(str(where)):
        return "it is not writable: give the worker's role write permission"
    if number == errno.EROFS:
        return "it is mounted read-only: mount it writable"
    return (
        f"user {os.geteuid()} cannot write there: make it writable for that user (fsGroup; a hostPath takes none: "
        "chown it on the node)"
    )
