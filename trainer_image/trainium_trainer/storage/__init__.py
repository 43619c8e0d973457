"""Stores of durable checkpoints: their protocol, and its implementations for folders and S3 buckets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.trainer.addresses import OBJECT_STORES, is_address
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from trainium_trainer.storage.protocol import Storage


def open_storage(path: str) -> Storage:
    """Return the store behind `checkpoint.path`: `s3://bucket/prefix`, or a folder (FSx, NFS, a local disk).

    Raises UserError for a URL of another kind. No request is made.
    """
    scheme = path.partition("://")[0]
    if scheme in OBJECT_STORES:
        from trainium_trainer.storage.object_store import ObjectStorage  # noqa: PLC0415 - optional package

        return ObjectStorage(path)
    if is_address(path):
        forms = " or ".join(f"{name}://bucket/prefix" for name in OBJECT_STORES)
        raise UserError(f"checkpoint.path {path}: there is no store {scheme!r}: give a folder or {forms}")
    from trainium_trainer.storage.posix import PosixStorage  # noqa: PLC0415 - as the other one

    return PosixStorage(Path(path))
