"""Find the cache folder of a machine, prepared folders, and the size of their vocabulary.

Guarantees:
- A folder in the cache is named by a digest of its inputs and published by one rename.
- Prepared data in S3 are copied into the cache once and used from there.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainium_agent.linux.write_access import FORBIDDEN, FULL, explain_forbidden
from trainium_trainer.data.prepared.reader import KIND, MANIFEST_FILE, is_prepared, read_manifest
from trainium_trainer.data.sources.files import S3, read_with_retries, s3
from trainium_trainer.data.sources.hub import format_location
from trainium_trainer.data.tokens.tokenizer import CONFIG_FILE, TOKENIZER_FILE, count_entries, tokenizer_file
from trainium_trainer.exits import StorageError, TrainerError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainium_contract.trainer.data import DataConfig, HubConfig

T = TypeVar("T")

_log = logging.getLogger("trainium.data")
_NOT_A_FOLDER = frozenset({errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG})
_COPIED_AT_ONCE = 16 << 20


def cache_directory(config: DataConfig) -> Path:
    """Return the folder of tokenizers and tokens on this machine."""
    if config.cache_directory is not None:
        return Path(config.cache_directory).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home() may raise
    if os.access(base, os.W_OK) or os.access(Path(base).parent, os.W_OK):
        return Path(base) / "trainium-trainer"
    return _temporary_folder()


def with_cache(config: DataConfig, work: Callable[[Path], T]) -> T:
    """Run some work with the cache folder, or with a folder on this node's disk if the cache cannot be used.

    A read-only cache is still read. Raises UserError if the cache is not a folder, and the errors of the work.
    """
    cache = cache_directory(config)
    try:
        with use_cache(cache):
            return work(cache)
    except (UserError, StorageError) as error:
        cause, other = error.__cause__, _temporary_folder()
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


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"trainium-trainer-{os.getuid()}"


@contextmanager
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


@contextmanager
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


def list_sources(config: DataConfig) -> list[tuple[str, str, float]]:
    """Return name, text field and weight of each source."""
    if not config.sources:
        return [(_source_name(config.source, config.hub), config.text_field, 1.0)]
    return [
        (_source_name(source.source, source.hub), source.text_field or config.text_field, source.weight)
        for source in config.sources
    ]


def _source_name(source: str | None, hub: HubConfig | None) -> str:
    if hub is not None:
        return format_location(hub)
    assert source is not None, "checked with the configuration"
    return source


def find_validation_source(config: DataConfig) -> str | None:
    """Return the name of the separate validation source; None if validation uses a part of the training data."""
    validation = config.validation
    if validation is None or validation.hub_split is None or config.hub is None:
        return validation.source if validation is not None else None
    return format_location(config.hub, validation.hub_split)


def list_locations(config: DataConfig) -> list[str]:
    """Return the names of all sources, and of the separate source of `data.validation`."""
    validation = find_validation_source(config)
    return [name for name, _, _ in list_sources(config)] + ([validation] if validation else [])


def find_vocabulary_size(config: DataConfig) -> int:
    """Return the size of the data's tokenizer; access S3 only for data in S3. Raises UserError, StorageError."""
    if config.tokenizer.path is not None:
        return count_entries(tokenizer_file(config.tokenizer))
    for name, _, _ in list_sources(config):
        if name.startswith(S3):
            manifest = _remote_manifest(name)
            if manifest is not None:
                return int(json.loads(manifest)["vocabulary"])
        elif is_prepared(folder := Path(name).expanduser()):
            return count_entries(folder / TOKENIZER_FILE)
    return config.tokenizer.vocab_size


def has_prepared_sources(config: DataConfig) -> bool:
    """Return whether a source includes its tokenizer; access S3 only for data in S3. Raises UserError, StorageError."""
    return any(
        _remote_manifest(name) is not None if name.startswith(S3) else is_prepared(Path(name).expanduser())
        for name, _, _ in list_sources(config)
    )


def prepared_folder(name: str, cache: Path) -> Path | None:
    """Return the folder of prepared data of a source; None for other sources."""
    if not name.startswith(S3):
        folder = Path(name).expanduser()
        return folder if is_prepared(folder) else None
    manifest = _remote_manifest(name)
    return None if manifest is None else _copy_from_s3(name, manifest, cache)


def _remote_manifest(name: str) -> bytes | None:
    from pyarrow import fs  # noqa: PLC0415 - only data in S3 pays for it

    path = _object_key(name, MANIFEST_FILE)

    def text() -> bytes | None:
        if s3().get_file_info(path).type != fs.FileType.File:
            return None
        with s3().open_input_file(path) as stream:
            return bytes(stream.read())

    content = read_with_retries(name, text)
    return content if content is not None and KIND.encode() in content else None


def _copy_from_s3(name: str, manifest: bytes, cache: Path) -> Path:
    """Copy a folder into the cache, in the first process that needs it; reuse files of an interrupted copy."""
    folder = cache / f"mirror-{hashlib.sha256(manifest).hexdigest()[:32]}"
    if is_prepared(folder):
        return folder
    with hold_lock(cache / f"{folder.name}.lock"):
        if is_prepared(folder):
            return folder
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(exist_ok=True)
        (partial / MANIFEST_FILE).write_bytes(manifest)
        shards = read_manifest(partial).shards
        (partial / MANIFEST_FILE).unlink()
        sizes = {shard.file: shard.bytes for shard in shards} | {"index.arrow": -1, TOKENIZER_FILE: -1}
        for file, size in sizes.items():
            target = partial / file
            if not target.exists() or target.stat().st_size != size:
                read_with_retries(f"{name.rstrip('/')}/{file}", functools.partial(_copy, name, file, target))
        if read_with_retries(name, lambda: s3().get_file_info(_object_key(name, CONFIG_FILE)).is_file):
            read_with_retries(
                f"{name.rstrip('/')}/{CONFIG_FILE}", lambda: _copy(name, CONFIG_FILE, partial / CONFIG_FILE)
            )
        (partial / MANIFEST_FILE).write_bytes(manifest)
        partial.rename(folder)
    return folder


def _object_key(name: str, file: str) -> str:
    return f"{name.removeprefix(S3).rstrip('/')}/{file}"


def _copy(name: str, file: str, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    with s3().open_input_stream(_object_key(name, file)) as stream, temporary.open("wb") as copy:
        shutil.copyfileobj(stream, copy, _COPIED_AT_ONCE)
    temporary.replace(target)
