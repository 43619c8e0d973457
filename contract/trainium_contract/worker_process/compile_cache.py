"""Cache compiled graphs in the compiler's folder of a node and in a folder that nodes share.

A shared folder holds `files/<digest>` (each file once, named by its SHA-256) and `keys/<key>.json` (the files of a key
and their paths).

Guarantees:
- A file appears under its name only when it is complete (written as a draft, then renamed), and a key only after all of
  its files.
- A file whose digest is not its name is never copied into a node's folder.
- Files that a compiler has not finished are not copied to the shared folder.
- One of the processes and nodes that share a folder compiles a key. The lease of a holder that ended, or that has not
  renewed it for a minute, expires. Two holders at once do no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import uuid
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from trainium_contract.base import ContractModel, MessageModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("trainium.compile")
_CHUNK = 1 << 22
_OWN = ".trainium"
_MODULE = "MODULE_"
_FINISHED = "model.done"
_COMPILED = "model.neff"
_UNFINISHED_SUFFIXES = (".lock", ".tmp", ".part")
_LEASE_SECONDS = 60.0
_POLL_SECONDS = 1.0


class CompileOutcome(StrEnum):
    """The result for one key."""

    READY = "ready"
    """The node had the graphs."""
    FETCHED = "fetched"
    """The graphs were copied from the shared folder."""
    COMPILED = "compiled"


class CachedFile(ContractModel):
    """One file of the compiler's folder."""

    path: str = Field(min_length=1, max_length=1024, pattern=r"^[^/].*$")
    """The path relative to the folder."""
    size: int = Field(ge=0)
    """The size in bytes."""
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The SHA-256 of the contents."""


class CacheEntry(MessageModel):
    """The files of one key."""

    key: str
    files: tuple[CachedFile, ...] = ()


class DamagedError(Exception):
    """A file of the shared folder does not have the digest in its name; the text names it."""


class LocalCache:
    """The folder that the compiler of this node reads and writes, with a marker for each complete key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lock_path(self, key: str) -> Path:
        """Return the path of a key's lock."""
        return self.folder / _OWN / "locks" / key

    def has(self, key: str) -> bool:
        """Return whether all files of the key exist, by name and size."""
        entry = _read_entry(self._get_entry_file(key), key)
        return entry is not None and all(_measure_size(self.folder / file.path) == file.size for file in entry.files)

    def list_finished_files(self) -> Iterator[Path]:
        """Yield the files that a compiler has finished."""
        for root, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            folder = Path(root)
            if folder.name.startswith(_MODULE) and not {_FINISHED, _COMPILED} <= set(names):
                folders.clear()
                continue
            for name in sorted(names):
                if not name.startswith(".") and not name.endswith(_UNFINISHED_SUFFIXES):
                    yield folder / name

    def build_entry(self, key: str) -> CacheEntry:
        """Return the current files of the folder as the entry of a key."""
        files = [
            CachedFile(path=str(path.relative_to(self.folder)), size=path.stat().st_size, digest=_digest(path))
            for path in self.list_finished_files()
        ]
        return CacheEntry(key=key, files=tuple(files))

    def mark_complete(self, entry: CacheEntry) -> None:
        """Record that the key is complete."""
        _write_entry(self._get_entry_file(entry.key), entry)

    def _get_entry_file(self, key: str) -> Path:
        return self.folder / _OWN / f"{key}.json"


class SharedCache:
    """A folder that all nodes share; it may be deleted as a whole while no process compiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lock_path(self, key: str) -> Path:
        """Return the path of a key's lock."""
        return self.folder / "locks" / key

    def has(self, key: str) -> bool:
        """Return whether the key was published."""
        return self._get_entry_file(key).exists()

    def fetch(self, key: str, local: LocalCache) -> CacheEntry | None:
        """Copy the files of a key that the node lacks; None if the key is missing, or damaged and set aside."""
        entry = _read_entry(self._get_entry_file(key), key)
        if entry is None:
            return None
        try:
            # A compiler treats a folder with its marker as complete, so markers are copied last.
            for file in sorted(entry.files, key=lambda file: file.path.endswith(_FINISHED)):
                target = _resolve_within(local.folder, file.path)
                if _measure_size(target) != file.size:
                    self._copy_in(file, target)
        except DamagedError as damage:
            _log.warning("%s: it is set aside and compiled again", damage)
            with contextlib.suppress(OSError):
                self._get_entry_file(key).rename(
                    self._get_entry_file(key).with_suffix(f".damaged-{uuid.uuid4().hex[:8]}")
                )
            return None
        local.mark_complete(entry)
        return entry

    def publish(self, key: str, local: LocalCache) -> CacheEntry:
        """Copy the files that the shared folder lacks, then write the key."""
        entry = local.build_entry(key)
        for file in entry.files:
            target = self._get_file(file)
            if _measure_size(target) != file.size:
                _copy(local.folder / file.path, target, file.digest)
        _write_entry(self._get_entry_file(key), entry)
        local.mark_complete(entry)
        return entry

    def _copy_in(self, file: CachedFile, target: Path) -> None:
        source = self._get_file(file)
        try:
            _copy(source, target, file.digest)
        except FileNotFoundError as error:
            raise DamagedError(f"{source}, which {file.path} needs, is not there") from error
        except DamagedError:
            with contextlib.suppress(OSError):
                source.rename(source.with_suffix(f".damaged-{uuid.uuid4().hex[:8]}"))
            raise

    def _get_file(self, file: CachedFile) -> Path:
        return self.folder / "files" / file.digest[:2] / file.digest

    def _get_entry_file(self, key: str) -> Path:
        return self.folder / "keys" / f"{key}.json"


def fill_cache(
    key: str,
    local: LocalCache,
    shared: SharedCache | None,
    compile_graphs: Callable[[], object],
    *,
    force: bool = False,
) -> CompileOutcome:
    """Ensure that the node has the graphs of a key: find, else copy, else compile and share them.

    Raises OSError, and what `compile_graphs` raises.
    """
    home = shared or local
    hit = None if force else _find_compiled(key, local, shared)
    if hit is not None:
        return hit
    with hold_lease(home.lock_path(key), unless=lambda: not force and home.has(key)):
        # Another process may have compiled the key while this one waited.
        hit = None if force else _find_compiled(key, local, shared)
        if hit is not None:
            return hit
        compile_graphs()
        if shared is not None:
            shared.publish(key, local)
        else:
            local.mark_complete(local.build_entry(key))
    return CompileOutcome.COMPILED


@contextlib.contextmanager
def hold_lease(path: Path, *, unless: Callable[[], bool]) -> Iterator[bool]:
    """Hold the lease at `path`, or stop waiting for it once `unless` holds; yield whether it is held.

    Raises OSError when the folder cannot be written.
    """
    from filelock import SoftFileLease, Timeout  # noqa: PLC0415 - of the extra `compile`

    path.parent.mkdir(parents=True, exist_ok=True)
    lease = SoftFileLease(path, lease_duration=_LEASE_SECONDS, poll_interval=_POLL_SECONDS)
    while not lease.is_locked and not unless():
        with contextlib.suppress(Timeout):
            lease.acquire(timeout=_POLL_SECONDS)
    try:
        yield lease.is_locked
    finally:
        lease.release()


def _find_compiled(key: str, local: LocalCache, shared: SharedCache | None) -> CompileOutcome | None:
    """Return the source of a key that needs no compilation; None if it must be compiled."""
    if local.has(key):
        if shared is not None and not shared.has(key):
            shared.publish(key, local)
        return CompileOutcome.READY
    return CompileOutcome.FETCHED if shared is not None and shared.fetch(key, local) else None


def _copy(source: Path, target: Path, digest: str) -> None:
    """Copy a file atomically. Raises DamagedError if the source does not have the digest."""
    with source.open("rb") as stream:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name[:64]}.{uuid.uuid4().hex}.part")
        seen = hashlib.sha256()
        try:
            with draft.open("xb") as copy:
                while chunk := stream.read(_CHUNK):
                    seen.update(chunk)
                    copy.write(chunk)
                copy.flush()
                os.fsync(copy.fileno())
            if seen.hexdigest() != digest:
                raise DamagedError(f"{source} does not have the SHA-256 {digest}")
            draft.rename(target)
        finally:
            draft.unlink(missing_ok=True)


def _write_entry(path: Path, entry: CacheEntry) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    draft.write_text(entry.model_dump_json(by_alias=True), encoding="utf-8")
    draft.rename(path)


def _read_entry(path: Path, key: str) -> CacheEntry | None:
    """Read the entry of a key; None if it is missing or cannot be read."""
    try:
        entry = CacheEntry.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return entry if entry.key == key else None


def _resolve_within(folder: Path, path: str) -> Path:
    """Return `path` within the folder. Raises DamagedError for a path outside it."""
    if ".." in Path(path).parts:
        raise DamagedError(f"the cache names a file outside of its folder: {path}")
    return folder / path


def _measure_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
