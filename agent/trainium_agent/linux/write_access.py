"""Explain places that cannot be written: the errors, the user who cannot write, and the remedy.

A worker is an ordinary user (1000 by default). A volume gets the pod's fsGroup where its driver supports that; a
`hostPath` never does (docs/install.md), so the most frequent cause is a folder of root's.
"""

from __future__ import annotations

import errno
import os

from trainium_contract.trainer.addresses import is_address

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No room: the disk, a quota or a limit of the file's size."""
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""No right to, whatever room there is; trying again does not help."""


def explain_forbidden(number: int | None, where: object = "", *, user: int | None = None) -> str:
    """Return the cause and the remedy for an errno of `FORBIDDEN`.

    `where`: the place, a bucket or a folder; `user`: the id of who writes, default ours.
    """
    if is_address(str(where)):
        return "it is not writable: give the worker's role write permission"
    if number == errno.EROFS:
        return "it is mounted read-only: mount it writable"
    who = os.geteuid() if user is None else user
    return (
        f"user {who} cannot write there: make it writable for that user (fsGroup; a hostPath takes none: chown it on "
        "the node)"
    )
