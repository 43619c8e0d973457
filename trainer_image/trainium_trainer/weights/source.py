"""The bytes of a folder with a model: read from a file system, or in ranges from an object store.

Invariants: a stretch that was read holds no memory once it is left; only what is asked for is read; a store that fails
ends with a sentence that begins with what the user named.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from trainium_contract.trainer.addresses import is_address
from trainium_trainer.exits import UnreadableError, UserError
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.opening import open_storage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainium_trainer.storage.protocol import Storage

T = TypeVar("T")
_RANGE_BYTES = 8 << 20
_REQUESTS_AT_ONCE = 8


class WeightsSource:
    """A folder of files that are read and never written; of an object store a long stretch in several ranges at once.

    Files are read and not mapped: a file that is cut short is then an error and not a signal.
    """

    def __init__(self, storage: Storage, where: str, *, remote: bool) -> None:
        self.where = where
        """Start of every sentence about it: the setting and its value."""
        self._storage = storage
        self._remote = remote

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the bytes of each file directly in the folder, or in a folder below it.

        UserError when there is nothing below a prefix.
        """
        entries = _tried(lambda: self._storage.list(folder), self.where)
        found = {entry.name: entry.size for entry in entries if not entry.is_folder}
        if self._remote and not found and not folder:
            raise UnreadableError(f"{self.where}: there is nothing below this prefix: correct it")
        return found

    def read(self, name: str) -> bytes:
        """Return a small file as a whole."""
        return _tried(lambda: self._storage.read(name), self.where)

    @contextmanager
    def stretch(self, name: str, start: int, length: int) -> Iterator[memoryview]:
        """Yield some bytes of a file, valid within the context."""
        view: memoryview = torch.empty(length, dtype=torch.uint8).numpy().data
        size = _RANGE_BYTES if self._remote else length

        def fetch(at: int) -> None:
            _tried(lambda: self._storage.read_into(name, start + at, view[at : at + size]), self.where)

        if length <= size:
            fetch(0)
        else:
            with ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="weights-read") as pool:
                for done in [pool.submit(fetch, at) for at in range(0, length, size)]:
                    done.result()
        yield view


def open_source(location: str, field: str) -> WeightsSource:
    """Return the folder or address that the setting `field` names. UserError when there is no such folder."""
    where = f"{field} {location}"
    if is_address(location):
        return WeightsSource(open_storage(location), where, remote=True)
    folder = Path(location).expanduser()
    if folder.is_dir():
        return WeightsSource(open_storage(str(folder)), where, remote=False)
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


def _tried(action: Callable[[], T], where: str) -> T:
    """Return the action's result, after retries; StorageError with a sentence of ours when it fails for good."""
    try:
        return Retry().run(action, where)
    except StorageError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise StorageError(f"{where}: cannot be read ({reason}): look at the store and at its permissions") from error
