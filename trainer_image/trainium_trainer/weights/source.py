"""The bytes of a folder with a model: read from a file system, or in ranges from an object store.

Invariants: a stretch that was read holds no memory once it is left; only what is asked for is read; a store that fails
ends with a sentence that begins with what the user named.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from trainium_contract.trainer.addresses import is_address
from trainium_trainer.exits import UnreadableError, UserError
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.opening import open_storage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from trainium_trainer.storage.protocol import Storage

T = TypeVar("T")
_RANGE_BYTES = 8 << 20
_REQUESTS_AT_ONCE = 8


class WeightsSource(Protocol):
    """A folder of files that are read and never written."""

    @property
    def where(self) -> str:
        """Start of every sentence about it: the setting and its value."""
        ...

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the bytes of each file directly in the folder, or in a folder below it."""
        ...

    def read(self, name: str) -> bytes:
        """Return a small file as a whole."""
        ...

    def stretch(self, name: str, start: int, length: int) -> AbstractContextManager[memoryview]:
        """Return some bytes of a file, valid within the context."""
        ...


def open_source(location: str, field: str) -> WeightsSource:
    """Return the folder or address that the setting `field` names. UserError when there is no such folder."""
    where = f"{field} {location}"
    if is_address(location):
        return RemoteSource(open_storage(location), where)
    folder = Path(location).expanduser()
    if folder.is_dir():
        return LocalSource(folder, where)
    if folder.exists():
        raise UserError(f"{where}: is a file: name the folder that holds it and its config.json")
    if _may_be_on_the_hub(location):
        raise UserError(
            f"{where}: there is no such folder; if it is a name on the hub, fetch it first: `trainium-trainer "
            f"fetch-model {location} --output DIR`, then name DIR"
        )
    raise UnreadableError(f"{where}: there is no such folder: correct the path, or mount it in every worker")


def _may_be_on_the_hub(location: str) -> bool:
    """Return whether it has the form `name` or `owner/name`, which a path of a mounted folder has not."""
    parts = location.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts) and "://" not in location


class LocalSource:
    """A folder of a file system, read and not mapped: a file that is cut short is then an error and not a signal."""

    def __init__(self, folder: Path, where: str) -> None:
        self.where = where
        self._folder = folder
        self._storage = open_storage(str(folder))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """See WeightsSource."""
        return _sizes(self._storage, self.where, folder)

    def read(self, name: str) -> bytes:
        """Return a small file."""
        return _tried(lambda: self._storage.read(name), self.where)

    @contextmanager
    def stretch(self, name: str, start: int, length: int) -> Iterator[memoryview]:
        """Return a buffer with the range, from the pages that all processes of a machine share."""
        view: memoryview = torch.empty(length, dtype=torch.uint8).numpy().data
        _tried(lambda: self._storage.read_into(name, start, view), self.where)
        yield view


class RemoteSource:
    """A prefix of an object store; a long stretch is read in several ranges at once."""

    def __init__(self, storage: Storage, where: str) -> None:
        self.where = where
        self._storage = storage

    def sizes(self, folder: str = "") -> dict[str, int]:
        """See WeightsSource. UserError when there is nothing below the prefix."""
        found = _sizes(self._storage, self.where, folder)
        if not found and not folder:
            raise UnreadableError(f"{self.where}: there is nothing below this prefix: correct it")
        return found

    def read(self, name: str) -> bytes:
        """Return a small object."""
        return _tried(lambda: self._storage.read(name), self.where)

    @contextmanager
    def stretch(self, name: str, start: int, length: int) -> Iterator[memoryview]:
        """Return a buffer with the range."""
        view = memoryview(bytearray(length))

        def fetch(at: int) -> None:
            part = view[at : at + _RANGE_BYTES]
            _tried(lambda: self._storage.read_into(name, start + at, part), self.where)

        if length <= _RANGE_BYTES:
            fetch(0)
        else:
            with ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="weights-read") as pool:
                for done in [pool.submit(fetch, at) for at in range(0, length, _RANGE_BYTES)]:
                    done.result()
        yield view


def _sizes(storage: Storage, where: str, folder: str) -> dict[str, int]:
    return {entry.name: entry.size for entry in _tried(lambda: storage.list(folder), where) if not entry.is_folder}


def _tried(action: Callable[[], T], where: str) -> T:
    """Return the action's result, after retries; StorageError with a sentence of ours when it fails for good."""
    try:
        return Retry().run(action, where)
    except StorageError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise StorageError(f"{where}: cannot be read ({reason}): look at the store and at its permissions") from error
