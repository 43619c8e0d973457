"""A folder of artifacts in a store, with retries, and explanations of its errors."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from trainium_contract.base import MessageModel
from trainium_contract.worker_process.write_access import FORBIDDEN, FULL, explain_forbidden
from trainium_trainer.exits import StorageError
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.protocol import Retry, read_small

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.storage.protocol import Entry

T = TypeVar("T")
M = TypeVar("M", bound=MessageModel)


def create_write_error(error: OSError, location: str) -> StorageError:
    """Return the error for an artifact that cannot be written."""
    if error.errno in FULL:
        advice = "free space and start again, what is complete is not written again"
    elif error.errno in FORBIDDEN:
        advice = f"{explain_forbidden(error.errno, location)}, or name another place"
    else:
        advice = "look at the store and start again, what is complete is not written again"
    return StorageError(f"artifact {location}: cannot be written ({error.strerror or error}): {advice}")


class ArtifactStore:
    """A folder, or s3://bucket/prefix; its methods raise StorageError when all retries fail."""

    def __init__(self, location: str, retry: Retry | None = None) -> None:
        """Open the folder. No request is made."""
        self.storage = open_storage(location)
        self.location = self.storage.location
        self._retry = retry or Retry()

    def run(self, action: Callable[[], T]) -> T:
        """Return the result of an access."""
        return self._retry.run(action, self.location, create_write_error)

    def list(self, folder: str = "") -> list[Entry]:
        """Return the entries of a folder, sorted; empty if it does not exist."""
        return self.run(lambda: self.storage.list(folder))

    def read(self, name: str) -> bytes | None:
        """Read a small file; None if it does not exist."""
        return self.run(lambda: read_small(self.storage, name))

    def read_message(self, name: str, kind: type[M]) -> M | None:
        """Read a file with a message; None if it does not exist or holds another message."""
        data = self.read(name)
        with suppress(ValidationError):
            return None if data is None else kind.model_validate_json(data)
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a small file atomically."""
        self.run(lambda: self.storage.write(name, data))

    def remove_drafts(self) -> None:
        """Remove drafts of killed writers; errors are ignored."""
        with suppress(OSError):
            self.storage.remove_drafts()
