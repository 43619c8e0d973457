"""Read the bytes of a folder with a model from a file system, or in ranges from an object store.

Guarantees:
- A range that was read is freed at the end of its context.
- Only requested bytes are read.
- An error of the store begins with the user's setting.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainium_contract.trainer.addresses import is_address
from trainium_trainer.exits import UnreadableError, UserError
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from trainium_trainer.storage.protocol import Entry, Storage

_RANGE_BYTES = 8 << 20
_REQUESTS_AT_ONCE = 8


class WeightsSource:
    """A read-only folder of files; long ranges of an object store are read by several requests at once.

    Files are read, not memory-mapped, so that a truncated file is an error and not a signal.
    """

    def __init__(self, storage: Storage, label: str, *, remote: bool) -> None:
        self.label = label
        """The beginning of every message: the setting and its value."""
        self._storage = storage
        self._remote = remote

    def list_sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size of each file in the folder or one level below. Raises UserError for an empty prefix."""
        sizes = {entry.name: entry.size for entry in self._list_files(folder)}
        if self._remote and not sizes and not folder:
            raise UnreadableError(f"{self.label}: there is nothing below this prefix: correct it")
        return sizes

    def list_versions(self, names: Collection[str]) -> list[tuple[str, int, float]]:
        """Return name, size and time of the last change of files; a changed file has another version."""
        folders = sorted({name.rpartition("/")[0] for name in names})
        files = {
            f"{folder}/{entry.name}".lstrip("/"): entry for folder in folders for entry in self._list_files(folder)
        }
        return [(name, files[name].size, files[name].modified) for name in sorted(names) if name in files]

    def _list_files(self, folder: str) -> list[Entry]:
        entries = Retry().run(lambda: self._storage.list(folder), self.label, _create_read_error)
        return [entry for entry in entries if not entry.is_folder]

    def read(self, name: str) -> bytes:
        """Read a small file."""
        return Retry().run(lambda: self._storage.read(name), self.label, _create_read_error)

    @contextmanager
    def read_range(self, name: str, start: int, length: int) -> Iterator[memoryview]:
        """Yield a range of bytes of a file, valid within the context."""
        view: memoryview = torch.empty(length, dtype=torch.uint8).numpy().data
        size = _RANGE_BYTES if self._remote else length

        def fetch(at: int) -> None:
            part = view[at : at + size]
            Retry().run(lambda: self._storage.read_into(name, start + at, part), self.label, _create_read_error)

        if length <= size:
            fetch(0)
        else:
            with ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="weights-read") as pool:
                for done in [pool.submit(fetch, at) for at in range(0, length, size)]:
                    done.result()
        yield view


def open_source(location: str, field: str) -> WeightsSource:
    """Open the folder or URL of the setting `field`. Raises UserError if there is no such folder."""
    label = f"{field} {location}"
    if is_address(location):
        return WeightsSource(open_storage(location), label, remote=True)
    folder = Path(location).expanduser()
    if folder.is_dir():
        return WeightsSource(open_storage(str(folder)), label, remote=False)
    if folder.exists():
        raise UserError(f"{label}: is a file: name the folder that holds it and its config.json")
    if _has_form_of_hub_name(location):
        raise UserError(
            f"{label}: there is no such folder; if it is a name on the hub, fetch it first: `trainium-trainer "
            f"fetch-model {location} --output DIR`, then name DIR"
        )
    raise UnreadableError(f"{label}: there is no such folder: correct the path, or mount it in every worker")


def _has_form_of_hub_name(location: str) -> bool:
    """Return whether a location has the form `name` or `owner/name`, unlike the path of a mounted folder."""
    parts = location.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts) and "://" not in location


def _create_read_error(error: OSError, label: str) -> StorageError:
    reason = error.strerror or error
    return StorageError(f"{label}: cannot be read ({reason}): look at the store and at its permissions")
