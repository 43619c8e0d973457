"""A folder of a file system as a checkpoint store: a local disk, NFS, Lustre (FSx), EFS.

Guarantees:
- Files appear atomically, by a rename or a hard link of a finished draft, so a process that resumes late cannot damage
  files that others have finished.
- Data and the folder of a new name are synchronized to the device before a call returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from trainium_trainer.storage.errors import DamagedFileError
from trainium_trainer.storage.protocol import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from io import FileIO
    from pathlib import Path

_FOLDER_ATTEMPTS = 3
_DRAFT = ".draft-"
_DRAFT_BYTES = 6
_DRAFT_NAME = re.compile(rf"{re.escape(_DRAFT)}[0-9a-f]{{{2 * _DRAFT_BYTES}}}")
_SEND_BYTES = 16 << 20
_SYNC_FILE_RANGE_WRITE = 2
"""SYNC_FILE_RANGE_WRITE of <fcntl.h>: start to write dirty pages without waiting."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class PosixStorage:
    """A folder of a file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def location(self) -> str:
        """The root, for messages."""
        return str(self._root)

    def prepare(self) -> None:
        """Create the root."""
        self._root.mkdir(parents=True, exist_ok=True)

    def list(self, folder: str) -> list[Entry]:
        """Return the names in a folder, without drafts."""
        entries: list[Entry] = []
        try:
            with os.scandir(self._root / folder) as scan:
                for item in scan:
                    try:
                        status = item.stat()
                    except FileNotFoundError:  # removed in the meantime
                        continue
                    is_folder = item.is_dir()
                    if not item.name.startswith(_DRAFT):
                        entries.append(Entry(item.name, 0 if is_folder else status.st_size, is_folder, status.st_mtime))
        except FileNotFoundError:
            return []
        return sorted(entries, key=lambda entry: entry.name)

    def read(self, name: str) -> bytes:
        """Read a small file."""
        return (self._root / name).read_bytes()

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` from a file."""
        with (self._root / name).open("rb", buffering=0) as file:
            file.seek(start)
            filled = 0
            while filled < len(target):
                count = file.readinto(target[filled:])
                if not count:
                    raise DamagedFileError(f"{name} ends too early")
                filled += count

    def write(self, name: str, data: bytes) -> None:
        """Write a draft and rename it over the file."""
        draft = self._draft(name, data)
        draft.replace(self._root / name)
        _sync_folder(draft.parent)

    def create(self, name: str, data: bytes) -> None:
        """Write a draft and link it to the name, which fails if the name exists."""
        draft, target = self._draft(name, data), self._root / name
        try:
            os.link(draft, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # On a file system without hard links, the last of concurrent writers would win.
            if target.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from None
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
        _sync_folder(target.parent)

    def write_stream(self, name: str, pieces: Iterable[memoryview], size: int) -> None:  # noqa: ARG002 - for other stores
        """Write a draft, flushing to the device from the first pieces on, and rename it over the file."""
        path = self._root / name
        with _open_draft(path) as (draft, file):
            sent = written = 0
            for piece in pieces:
                _write_all(file, piece)
                written += len(piece)
                if written - sent >= _SEND_BYTES:
                    start_writing = _sync_file_range()
                    if start_writing is not None:
                        start_writing(file.fileno(), sent, written - sent, _SYNC_FILE_RANGE_WRITE)
                    sent = written
        draft.replace(path)
        _sync_folder(path.parent)

    def remove_file(self, name: str) -> None:
        """Remove a file."""
        (self._root / name).unlink(missing_ok=True)

    def remove_files(self, folder: str, should_remove: Callable[[str], bool]) -> None:
        """Unlink files and drafts, then the folder and its empty parents below the root."""
        path = self._root / folder
        with contextlib.suppress(FileNotFoundError), os.scandir(path) as scan:
            for item in scan:
                if not item.is_dir(follow_symlinks=False) and (
                    should_remove(item.name) or _DRAFT_NAME.fullmatch(item.name)
                ):
                    (path / item.name).unlink(missing_ok=True)
        for parent in (path, *path.parents):
            if parent == self._root:
                break
            try:
                parent.rmdir()
            except FileNotFoundError:
                continue
            except OSError:  # not empty
                break

    def iterate_parents(self) -> Iterator[PosixStorage]:
        """Yield the parent folders of the root, the nearest first."""
        return (PosixStorage(parent) for parent in self._root.absolute().parents)

    def remove_drafts(self) -> None:
        """Remove the drafts directly in the root, but not a user's file whose name only begins like theirs."""
        for path in self._root.glob(f"{_DRAFT}*"):
            if _DRAFT_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _draft(self, name: str, data: bytes) -> Path:
        with _open_draft(self._root / name) as (draft, file):
            _write_all(file, memoryview(data))
        return draft


@contextlib.contextmanager
def _open_draft(path: Path) -> Iterator[tuple[Path, FileIO]]:
    """Yield a draft of a file, synchronized when the context ends; a failed draft is removed."""
    draft = path.with_name(f"{_DRAFT}{secrets.token_hex(_DRAFT_BYTES)}")
    try:
        with _create_file(draft) as file:
            yield draft, file
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _create_file(path: Path) -> FileIO:
    """Create a file in a folder that is created as needed, even while another process removes it as empty."""
    for _ in range(_FOLDER_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return path.open("wb", buffering=0)
    return path.open("wb", buffering=0)


def _write_all(file: FileIO, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += file.write(data[written:])


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def _sync_file_range() -> Callable[..., Any] | None:
    """Return sync_file_range(2); None if the system lacks it."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function
