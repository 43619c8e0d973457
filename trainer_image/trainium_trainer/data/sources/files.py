"""Find, open and identify the files of a source on a mounted file system or in S3.

Guarantees:
- Files are sorted by name, independently of the listing.
- S3 is reached through pyarrow only, with the credentials, region and endpoint of the usual AWS variables.
- Requests to a failing store are retried for a while before they raise StorageError.
- Problems that the user can correct (no such file, no permission) raise UserError at once.
"""

from __future__ import annotations

import errno
import fnmatch
import functools
import glob
import hashlib
import io
import logging
import multiprocessing
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from trainium_trainer.data.cache import write_cache_file
from trainium_trainer.exits import StorageError, TrainerError, UnreadableError, UserError
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

S3 = "s3://"
HUB = "hf://"
_COMPRESSED = (".gz", ".zst")
_PLAIN = (".txt", ".jsonl", ".json", ".csv")
_TABLES = (".arrow", ".parquet")
SUFFIXES = (*_PLAIN, *(plain + packed for plain in _PLAIN for packed in _COMPRESSED), *_TABLES)
_NOT_IN_FOLDERS = ".json"
"""A single .json in a folder of data is the metadata of a library, or `template.json`, not data."""

_MAX_LISTED = 3
_log = logging.getLogger("trainium.data")

_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
_S3_TIMEOUT_SECONDS = 30
_LOCAL_BUFFER = 1 << 20
_REMOTE_BUFFER = 8 << 20
_USER_ERRORS = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
_USER_ERROR_CODES = ("ACCESS_DENIED", "NO_SUCH_BUCKET", "NO_SUCH_KEY", "INVALID_ACCESS_KEY", "SIGNATURE_DOES_NOT_MATCH")
_WHOLE = 64 << 20
_PROBES, _PROBE = 64, 64 << 10


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a source."""

    path: str
    """The absolute path; bucket and key; or data set, commit and path."""
    size: int
    """The stored size in bytes."""
    stamp: str
    """A stamp that changes when the file is replaced; on the hub the digest of its contents."""
    relative: str
    """The name relative to the source's root: part of the identity."""
    scheme: str = ""
    """The scheme of its URL in a store; empty for a local file."""

    @property
    def remote(self) -> bool:
        """Whether the file is in a store."""
        return bool(self.scheme)

    @property
    def name(self) -> str:
        """The name, for messages."""
        return self.scheme + self.path

    @property
    def format(self) -> str:
        """The suffix, without that of a compression."""
        stem = self.path
        for packed in _COMPRESSED:
            stem = stem.removesuffix(packed)
        return Path(stem).suffix

    @property
    def compression(self) -> str | None:
        """Arrow's name of the compression of the whole file."""
        return {".gz": "gzip", ".zst": "zstd"}.get(Path(self.path).suffix)

    def open(self) -> BinaryIO:
        """Open the stored bytes as a buffered, seekable stream."""
        if self.remote:
            return cast("BinaryIO", io.BufferedReader(self.open_remote(), _REMOTE_BUFFER))
        return open(self.path, "rb", buffering=_LOCAL_BUFFER)  # noqa: PTH123 - the caller closes it

    def open_remote(self) -> Any:
        """Open a file in a store as an unbuffered stream, which reads only the requested ranges."""
        return open_s3().open_input_file(self.path)

    def digest(self, cache_folder: Path | None) -> str:
        """Return a digest of the contents; above 64 MiB, of the size and of samples spread over the file.

        An object in S3 is identified by size and time, which are the same for all readers. The hub provides digests.
        """
        if self.remote:
            return hashlib.sha256(f"{self.size}\0{self.stamp}".encode()).hexdigest()
        key = hashlib.sha256(f"2\0{self.path}\0{self.size}\0{self.stamp}".encode()).hexdigest()[:32]
        cached_file = cache_folder / f"digest-{key}" if cache_folder else None
        if cached_file is not None and cached_file.exists():
            return cached_file.read_text(encoding="ascii")
        digest = read_with_retries(self.name, self._digest)
        if cached_file is not None:
            write_cache_file(cached_file, digest.encode())
        return digest

    def _digest(self) -> str:
        with self.open() as stream:
            if self.size <= _WHOLE:
                return hashlib.file_digest(cast("Any", stream), "sha256").hexdigest()
            total = hashlib.sha256(str(self.size).encode())
            for number in range(_PROBES):
                stream.seek(number * (self.size - _PROBE) // (_PROBES - 1))
                total.update(stream.read(_PROBE))
            return total.hexdigest()


def read_with_retries(what: str, action: Callable[[], T]) -> T:
    """Run a read, with retries while the store fails. Raises UserError or StorageError."""
    return Retry(_PAUSES_SECONDS, is_retryable=_is_transient).run(action, what, _read_error)


def _read_error(error: OSError, what: str) -> TrainerError:
    """Return the error for a read that failed for good."""
    if not _is_transient(error):
        return create_read_error(what, error)
    return StorageError(
        f"data.source {what}: cannot be read after {len(_PAUSES_SECONDS) + 1} tries ({describe_error(error)}): "
        "look at the storage, then start again"
    )


def _is_transient(error: OSError) -> bool:
    """Return whether an error is the fault of the store, not of the request."""
    if error.errno is not None:
        return error.errno not in _USER_ERRORS
    text = str(error)
    return "AWS Error" in text and not any(code in text for code in _USER_ERROR_CODES)


def create_read_error(what: str, error: OSError) -> UnreadableError:
    """Return the error for a file that the user has to correct."""
    return UnreadableError(f"data.source {what}: cannot be read ({describe_error(error)}): correct or replace it")


def describe_error(error: BaseException) -> str:
    """Format the cause in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:300]


def is_in_store(name: str) -> bool:
    """Return whether a source is accessed over the network, with libraries that start threads."""
    return name.startswith((S3, HUB))


@functools.cache
def open_s3() -> Any:
    """Return the S3 file system of this process; it starts threads, so do not call it before a fork.

    pyarrow retries failed requests with an exponential backoff.
    """
    from pyarrow import fs  # noqa: PLC0415 - only data in S3 pays for it

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return fs.S3FileSystem(
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        endpoint_override=endpoint,
        scheme="http" if endpoint and endpoint.startswith("http://") else "https",
        request_timeout=_S3_TIMEOUT_SECONDS,
        connect_timeout=_S3_TIMEOUT_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=3),
    )


def read_s3_file(path: str) -> bytes | None:
    """Return the contents of an object by bucket and key; None if there is none. Raises OSError."""
    if not open_s3().get_file_info(path).is_file:
        return None
    with open_s3().open_input_file(path) as stream:
        return bytes(stream.read())


def find_files(name: str) -> tuple[DataFile, ...]:
    """Return the files of a path, folder or pattern, sorted by relative name.

    Raises UserError if there is none, and StorageError if the store does not answer.
    """
    try:
        files = _find_remote(name) if name.startswith(S3) else _find_local(name)
    except OSError as error:
        raise create_read_error(name, error) from error
    return tuple(sorted(files, key=lambda file: file.relative))


_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_IN_NAME = "(^|[-._ 0-9]){}([-._ 0-9]|$)"


def _choose_training_files(name: str, files: list[DataFile]) -> list[DataFile]:
    """Return the files of the training split of a folder, as `datasets` finds it by names; all files if it has none."""
    folders = [PurePosixPath(file.relative).parts[:-1] for file in files]
    names = [PurePosixPath(file.relative).parts[-1:] for file in files]
    for places in (folders, names):
        splits = [_find_splits(parts) for parts in places]
        if not any(splits):
            continue
        chosen = [file for file, split_names in zip(files, splits, strict=True) if "train" in split_names]
        left_out = sorted(file.relative for file in files if file not in chosen)
        if not chosen or not left_out:
            return files
        if multiprocessing.parent_process() is None:
            more = f", and {len(left_out) - _MAX_LISTED} more" if len(left_out) > _MAX_LISTED else ""
            _log.warning(
                "data.source %s: has splits, of which the training split is read: not %s%s (name the files by a "
                "pattern to read others)",
                name,
                ", ".join(left_out[:_MAX_LISTED]),
                more,
            )
        return chosen
    return files


def _find_splits(parts: tuple[str, ...]) -> set[str]:
    """Return the splits that folders or a file are named after."""
    return {
        split
        for split, keywords in _SPLITS.items()
        if any(re.search(_IN_NAME.format(f"({'|'.join(keywords)})"), part) for part in parts)
    }


def _find_local(name: str) -> list[DataFile]:
    path = Path(name).expanduser()
    if path.is_dir():
        files = [file for file in path.rglob("*") if _is_data_file(file.relative_to(path).parts) and file.is_file()]
        if not files:
            raise UnreadableError(f"data.source {name}: the folder holds no {list_formats()} file: put text into it")
        return _choose_training_files(name, [_open_local_file(file, path) for file in files])
    if path.exists():
        return [_open_local_file(_refuse_unknown_format(path, name), path.parent)]
    if glob.has_magic(name):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207 - any pattern
        files = [match for match in matches if match.is_file() and match.name.endswith(SUFFIXES)]
        if not files:
            raise UnreadableError(f"data.source {name}: no {list_formats()} file matches: correct the pattern")
        root = Path(os.path.commonpath([file.parent for file in files]))
        return [_open_local_file(file, root) for file in files]
    raise UnreadableError(f"data.source {name}: there is no such file or folder: correct the path or mount the data")


def _open_local_file(file: Path, root: Path) -> DataFile:
    stat = file.stat()
    stamp = f"{stat.st_mtime_ns}\0{stat.st_ino}"
    return DataFile(str(file.absolute()), stat.st_size, stamp, file.relative_to(root).as_posix())


def _find_remote(name: str) -> list[DataFile]:
    from pyarrow import fs  # noqa: PLC0415 - only data in S3 pays for it

    path = name.removeprefix(S3).rstrip("/")
    pattern = path if glob.has_magic(path) else None
    while glob.has_magic(path):
        path = path.rpartition("/")[0]
    if not path:
        raise UserError(f"data.source {name}: names no bucket: write s3://bucket/prefix")

    def list_objects() -> Iterator[Any]:
        single = open_s3().get_file_info(path)
        if single.type == fs.FileType.File:
            yield single
        elif single.type == fs.FileType.Directory:
            yield from open_s3().get_file_info(fs.FileSelector(path, recursive=True))

    files = []
    for info in read_with_retries(name, lambda: list(list_objects())):
        parts = tuple(info.path.removeprefix(path).strip("/").split("/"))
        is_wanted = _is_match(info.path, pattern) if pattern else _is_data_file(parts)
        if info.type == fs.FileType.File and (is_wanted or info.path == path):
            relative = "/".join(parts) or info.base_name
            files.append(DataFile(info.path, info.size, str(info.mtime_ns), relative, S3))
    if not files:
        raise UnreadableError(
            f"data.source {name}: there is no {list_formats()} object: correct bucket, prefix or credentials"
        )
    if files[0].path == path:
        _refuse_unknown_format(Path(path), name)
    return files if pattern else _choose_training_files(name, files)


def _is_match(path: str, pattern: str) -> bool:
    """Match as a shell does: `*` does not cross folders, `**` does."""
    levels_agree = "**" in pattern or path.count("/") == pattern.count("/")
    return levels_agree and fnmatch.fnmatchcase(path, pattern) and path.endswith(SUFFIXES)


def _is_data_file(parts: tuple[str, ...]) -> bool:
    """Return whether a file of a folder is data: of a known format, neither hidden nor metadata of a program."""
    hidden = any(part.startswith((".", "_")) for part in parts)
    return not hidden and parts[-1].endswith(SUFFIXES) and not parts[-1].endswith(_NOT_IN_FOLDERS)


def _refuse_unknown_format(path: Path, name: str) -> Path:
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"data.source {name}: files end in {list_formats()}: convert or rename it")
    return path


def list_formats() -> str:
    """Return the known suffixes, for messages."""
    return f"{', '.join((*_PLAIN, *_TABLES))} (text also with .gz or .zst)"
