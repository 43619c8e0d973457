"""Model folders as local folders: those in S3 are copied for the time that they are needed."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainium_contract.trainer.addresses import is_address
from trainium_trainer.checkpoint.storage.opening import open_storage
from trainium_trainer.checkpoint.storage.protocol import Retry
from trainium_trainer.exits import StorageError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
_CHUNK = 16 << 20


@contextlib.contextmanager
def local_folder(location: str, beat: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """The folder itself, or a copy of what is in S3 in a folder of temporary files; `beat` is called while copying.

    Raises StorageError, and UserError when there is nothing.
    """
    if not is_address(location):
        yield Path(location).expanduser()
        return
    storage, retry = open_storage(location), Retry()
    entries = [entry for entry in _read(lambda: storage.list(""), location, retry) if not entry.is_folder]
    if not entries:
        raise UserError(f"{location}: there are no files: correct the bucket or the prefix")
    with tempfile.TemporaryDirectory(prefix="trainium-model-") as scratch:
        for entry in entries:
            with (Path(scratch) / entry.name).open("wb") as file:
                for start in range(0, entry.size, _CHUNK):
                    piece = memoryview(bytearray(min(_CHUNK, entry.size - start)))
                    _read(lambda: storage.read_into(entry.name, start, piece), location, retry)  # noqa: B023 - called at once
                    file.write(piece)
                    beat()
        yield Path(scratch)


def _read(action: Callable[[], T], location: str, retry: Retry) -> T:
    try:
        return retry.run(action, location)
    except StorageError as error:
        cause = error.__cause__
        reason = getattr(cause, "strerror", None) or cause
        raise StorageError(f"model {location}: cannot be read ({reason}): look at the store and its rights") from cause
