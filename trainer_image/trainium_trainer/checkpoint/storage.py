"""Where durable checkpoints live: a small protocol, its POSIX implementation, and retries.

Invariants: names are relative to the root, with `/`; a file is on stable storage when its writer is closed; a rename is
atomic and on stable storage when it returns; only this file and its peers for other stores know how a store works.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

from trainium_trainer.checkpoint.errors import is_transient, storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder."""

    name: str
    size: int
    """Bytes; 0 for a folder."""
    is_folder: bool
    modified: float
    """Unix seconds."""


class Storage(Protocol):
    """What the durable tier needs of a store; every method raises OSError when the store fails."""

    @property
    def location(self) -> str:
        """The root, for sentences."""
        ...

    def prepare(self) -> None:
        """Make the root; OSError when it cannot be made."""
        ...

    def open_write(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A new file, folders made as needed; on stable storage when the context ends without an exception."""
        ...

    def open_read(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A seekable file; FileNotFoundError when it is not there."""
        ...

    def list(self, folder: str) -> list[Entry]:
        """The names in a folder ("" is the root); empty when it does not exist."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file (over an existing one) or a folder (to a name that is free)."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file or a whole folder; nothing happens when it does not exist."""
        ...


class PosixStorage:
    """A folder of a file system: a local disk, NFS, Lustre, EFS."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def location(self) -> str:
        """The root, for sentences."""
        return str(self._root)

    def prepare(self) -> None:
        """Make the root."""
        self._root.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        """A new file, synchronised to the device at the end."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def open_read(self, name: str) -> Iterator[BinaryIO]:
        """A file to read."""
        with (self._root / name).open("rb") as file:
            yield file

    def list(self, folder: str) -> list[Entry]:
        """The names in a folder."""
        entries: list[Entry] = []
        try:
            with os.scandir(self._root / folder) as scan:
                for item in scan:
                    try:
                        status = item.stat()
                    except FileNotFoundError:  # removed while we looked
                        continue
                    is_folder = item.is_dir()
                    entries.append(Entry(item.name, 0 if is_folder else status.st_size, is_folder, status.st_mtime))
        except FileNotFoundError:
            return []
        return sorted(entries, key=lambda entry: entry.name)

    def rename(self, old: str, new: str) -> None:
        """Rename and synchronise the folder that holds the new name."""
        target = self._root / new
        (self._root / old).rename(target)
        _sync_folder(target.parent)

    def remove(self, name: str) -> None:
        """Remove a file or a folder."""
        path = self._root / name
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            return


def write_small(storage: Storage, name: str, data: bytes) -> None:
    """Write a small file so that a reader sees the old contents or the new ones, never a part."""
    draft = f"{name}.draft"
    with storage.open_write(draft) as file:
        file.write(data)
    storage.rename(draft, name)


def read_small(storage: Storage, name: str) -> bytes | None:
    """The contents of a small file, None when it does not exist."""
    try:
        with storage.open_read(name) as file:
            return file.read()
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long a failed access is tried again when the fault may pass."""

    delays: tuple[float, ...] = (0.5, 2.0, 8.0)
    """Seconds before each further try."""
    sleep: Callable[[float], None] = time.sleep

    def run(self, action: Callable[[], T], where: str) -> T:
        """The action's result; StorageError with a sentence when it fails for good."""
        for delay in self.delays:
            try:
                return action()
            except OSError as error:
                if not is_transient(error):
                    raise storage_error(error, where) from error
                self.sleep(delay)
        try:
            return action()
        except OSError as error:
            raise storage_error(error, where) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
