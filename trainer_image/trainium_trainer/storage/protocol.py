"""The interface of a store of durable checkpoints, and its retries.

Guarantees:
- Names are relative to the root, with `/`.
- An incomplete file never appears under its name.
- Written data are on stable storage when a call returns.
- No commit is a rename, because object stores cannot.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from trainium_trainer.storage.errors import DamagedFileError, create_storage_error, is_transient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainium_trainer.exits import TrainerError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a folder."""

    name: str
    size: int
    """The size in bytes; 0 for a folder."""
    is_folder: bool
    modified: float
    """Unix seconds; 0 if unknown (folders of an object store)."""


class Storage(Protocol):
    """A store of checkpoints; every method raises OSError if the store fails."""

    @property
    def location(self) -> str:
        """The root, for messages."""
        ...

    def prepare(self) -> None:
        """Create the root, or check that it can be used. Raises OSError."""
        ...

    def list(self, folder: str) -> list[Entry]:
        """Return all entries directly in a folder ("" is the root), sorted; empty if it does not exist."""
        ...

    def read(self, name: str) -> bytes:
        """Read a small file. Raises FileNotFoundError if it does not exist."""
        ...

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on. Raises DamagedFileError if the file is too short."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a small file atomically."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Create a small file. Raises FileExistsError if it exists. Of several writers exactly one succeeds."""
        ...

    def write_stream(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        """Write or replace a file of `size` bytes, given in pieces; it appears atomically.

        Folders are created as needed.
        """
        ...

    def remove_file(self, name: str) -> None:
        """Remove a file if it exists."""
        ...

    def remove_files(self, folder: str, should_remove: Callable[[str], bool]) -> None:
        """Remove the files directly in a folder that `should_remove` accepts by name, and folders that are then empty.

        Drafts of killed writers in the folder are removed too. All other files stay.
        """
        ...

    def iterate_parents(self) -> Iterable[Storage]:
        """Return the parent folders of the root, the nearest first."""
        ...

    def remove_drafts(self) -> None:
        """Remove drafts of killed writers directly in the root; no writer may be active there."""
        ...


def read_small(storage: Storage, name: str) -> bytes | None:
    """Read a small file; None if it does not exist."""
    try:
        return storage.read(name)
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Retry:
    """The retries of a failed access whose fault may be transient."""

    delays: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
    """The seconds before each retry: a store that fails five times in a row costs only time."""
    sleep: Callable[[float], None] = time.sleep
    is_retryable: Callable[[OSError], bool] = is_transient
    """Return whether a retry may help."""

    def run(
        self,
        action: Callable[[], T],
        location: str,
        explain: Callable[[OSError, str], TrainerError] = create_storage_error,
    ) -> T:
        """Return the action's result. Raises what `explain` returns for the last error when all retries fail."""
        for delay in (*self.delays, None):
            try:
                return action()
            except OSError as error:
                if delay is None or not self.is_retryable(error):
                    raise explain(error, location) from error
                self.sleep(delay)
        raise AssertionError


def read_part(storage: Storage, name: str, start: int, target: memoryview, retry: Retry) -> None:
    """Fill `target` from a file that must exist. Raises DamagedFileError if it is missing or too short.

    Raises StorageError when all retries fail.
    """

    def read() -> None:
        try:
            storage.read_into(name, start, target)
        except FileNotFoundError as error:
            raise DamagedFileError(f"{name} is missing") from error

    retry.run(read, storage.location)
