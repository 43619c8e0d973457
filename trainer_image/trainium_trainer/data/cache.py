"""The cache folder of this machine, with tokenizers and tokens, and its files.

Guarantees:
- Where the cache cannot be written, it is still read, and missing data are built on the node's disk.
- A file or folder is published by one rename, by one process where it is created under a lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainium_contract.worker_process.write_access import FORBIDDEN, FULL, explain_forbidden
from trainium_trainer.exits import StorageError, TrainerError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainium_contract.trainer.data import DataConfig

T = TypeVar("T")

_log = logging.getLogger("trainium.data")
_NOT_A_FOLDER = frozenset({errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG})


def find_cache_directory(config: DataConfig) -> Path:
    """Return the folder of tokenizers and tokens on this machine."""
    if config.cache_directory is not None:
        return Path(config.cache_directory).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home() may raise
    if os.access(base, os.W_OK) or os.access(Path(base).parent, os.W_OK):
        return Path(base) / "trainium-trainer"
    return _create_temporary_folder()


def run_with_cache(config: DataConfig, work: Callable[[Path], T]) -> T:
    """Run some work with the cache folder, or with a folder on this node's disk if the cache cannot be used.

    A read-only cache is still read. Raises UserError if the cache is not a folder, and the errors of the work.
    """
    cache = find_cache_directory(config)
    try:
        with use_cache(cache):
            return work(cache)
    except (UserError, StorageError) as error:
        cause, other = error.__cause__, _create_temporary_folder()
        if not isinstance(error, _CacheError) or getattr(cause, "errno", None) in _NOT_A_FOLDER or other == cache:
            raise
        _log.warning("%s; it is only a cache: what is not in it is made again in %s", error, other)
    with use_cache(other):
        return work(other)


class _CacheError(TrainerError):
    """An error of the cache, not of the data."""


class _ForbiddenCacheError(_CacheError, UserError):
    """The cache cannot be written, and a retry would not help."""


class _FailingCacheError(_CacheError, StorageError):
    """The cache is full or fails."""


def _create_temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"trainium-trainer-{os.getuid()}"


@contextlib.contextmanager
def use_cache(cache: Path) -> Iterator[Path]:
    """Create the cache folder, and turn errors of the file system into errors of the cache."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        yield cache
    except OSError as error:
        kind = _ForbiddenCacheError if error.errno in FORBIDDEN | _NOT_A_FOLDER else _FailingCacheError
        if error.errno in FORBIDDEN:
            advice = f"{explain_forbidden(error.errno)}, or "
        elif error.errno in FULL:
            advice = "free space there or "
        else:
            advice = ""
        raise kind(
            f"data.cacheDirectory {cache}: cannot be used ({error.strerror or error}): "
            f"{advice}set data.cacheDirectory to a folder that can be written"
        ) from error


def write_cache_file(path: Path, content: bytes) -> None:
    """Write a file of the cache atomically and without a lock; errors are ignored.

    Drafts have random names, because process ids and addresses do not distinguish writers: pods number their processes
    equally, and ranks are forks of one process.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        try:
            draft.write_bytes(content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a file lock; the kernel releases it when the holder dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def create_once(path: Path, create: Callable[[], None]) -> Path:
    """Return `path`; if it is missing, one process calls `create`, which must publish it by a rename."""
    if not path.exists():
        with hold_lock(path.with_name(f".{path.name}.lock")):
            if not path.exists():
                create()
    return path
