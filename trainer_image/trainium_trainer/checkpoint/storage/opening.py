"""From a path to the store behind it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainium_trainer.checkpoint.storage.protocol import S3_SCHEME
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from trainium_trainer.checkpoint.storage.protocol import Storage


def open_storage(path: str) -> Storage:
    """The store behind `checkpoint.path`: `s3://bucket/prefix`, or a folder (FSx, NFS, a local disk).

    UserError for a path of another kind. Nothing is contacted yet.
    """
    if path.startswith(S3_SCHEME):
        from trainium_trainer.checkpoint.storage.s3 import S3Storage  # noqa: PLC0415 - an optional package

        return S3Storage.of(path)
    scheme, separator, _ = path.partition("://")
    if separator:
        raise UserError(f"checkpoint.path {path}: there is no store {scheme!r}: give a folder or s3://bucket/prefix")
    from trainium_trainer.checkpoint.storage.posix import PosixStorage  # noqa: PLC0415 - as the other one

    return PosixStorage(Path(path))
