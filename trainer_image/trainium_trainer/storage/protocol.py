"""The interface of durable checkpoints to a store: a small protocol, and its retries.

Guarantees:
- Names are relative to the root, with `/`.
- Nothing of a file that was not written to its end is ever taken for the file.
- What a call has written is on stable storage when it returns.
- No commit is a rename, because object stores cannot. `posix.py` and `s3.py` are the stores, `opening.py` finds the one
  behind a path.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from trainium_trainer.storage.errors import DamagedFileError, is_transient, storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder."""

    name: str
    size: int
    """Bytes; 0 for a folder."""
    is_folder: bool
    modified: float
    """Unix seconds; 0 where the store does not know it (folders of an object store)."""


class Storage(Protocol):
    """A store of checkpoints; every method raises OSError when the store fails."""

    @property
    def location(self) -> str:
        """The root, for sentences."""
        ...

    def prepare(self) -> None:
        """Make the root, or see that it can be used; OSError when not."""
        ...

    def list(self, folder: str) -> list[Entry]:
        """All names directly in a folder ("" is the root), sorted, however many; empty when it does not exist."""
        ...

    def read(self, name: str) -> bytes:
        """Return a small file; FileNotFoundError when it is not there."""
        ...

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; DamagedFileError when the file ends before that."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a small file; a reader sees the old contents or the new ones."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Write a small file that is not there yet; FileExistsError when it is. Of several writers one succeeds."""
        ...

    def write_stream(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        """Write or replace a file of `size` bytes, given in pieces; a reader sees nothing of it before its end.

        Folders are made as needed.
        """
        ...

    def remove_file(self, name: str) -> None:
        """Remove a file; nothing happens when it does not exist."""
        ...

    def remove_files(self, folder: str, should_remove: Callable[[str], bool]) -> None:
        """Remove the files directly in a folder whose names `should_remove` accepts, and folders that are empty then.

        Drafts that killed writers left in the folder are removed too. Everything else in the folder stays.
        """
        ...

    def parents(self) -> Iterable[Storage]:
        """Return the folders around the root, the nearest first."""
        ...

    def remove_drafts(self) -> None:
        """Remove what killed writers left of files directly in the root, where none may be at work any more."""
        ...


def read_small(storage: Storage, name: str) -> bytes | None:
    """Return the contents of a small file, None when it does not exist."""
    try:
        return storage.read(name)
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Retry:
    """The number and the delays of further attempts of an access that failed, when the fault may pass."""

    delays: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
    """Seconds before each further try: a store that fails five times in a row costs time and nothing else."""
    sleep: Callable[[float], None] = time.sleep
    is_worth_it: Callable[[OSError], bool] = is_transient
    """Whether another try may help."""

    def run(self, action: Callable[[], T], where: str) -> T:
        """Return the action's result; StorageError with a sentence when it fails for good."""
        for delay in self.delays:
            try:
                return action()
            except OSError as error:
                if not self.is_worth_it(error):
                    raise storage_error(error, where) from error
                self.sleep(delay)
        try:
            return action()
        except OSError as error:
            raise storage_error(error, where) from error


def read_part(storage: Storage, name: str, start: int, target: memoryview, retry: Retry) -> None:
    """Fill `target` from a file that must be there; DamagedFileError when it is not, or ends too early.

    StorageError when the store fails for good, whatever the state of the file.
    """

    def read() -> None:
        try:
            storage.read_into(name, start, target)
        except FileNotFoundError as error:
            raise DamagedFileError(f"{name} is missing") from error

    retry.run(read, storage.location)
