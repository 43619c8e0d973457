"""A prefix of a bucket as a checkpoint store, with the package `obstore` (extra `s3`).

Credentials, region and endpoint come from the environment, as the vendors' tools read it: variables, a web identity
token (IRSA), the container's or the instance's role. They never occur in a message: the store's response is reduced to
its error code and text.

Guarantees:
- Every request has a time limit and a bounded number of retries with backoff.
- A large file is a multipart upload that is aborted on failure, so that no partial object ever exists.
- `create` is a conditional write (`If-None-Match: *`).
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from trainium_trainer.exits import UserError
from trainium_trainer.storage.errors import DamagedFileError
from trainium_trainer.storage.protocol import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from obstore.store import ObjectStore

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._\-]{1,61}[a-z0-9]")
_PART_BYTES = 16 << 20
_MAX_PARTS = 9_000
"""S3 accepts 10,000 parts per upload."""
_UPLOADS_AT_ONCE = 4
_DELETES_AT_ONCE = 1_000
_STATUS = re.compile(r"status code: (\d+[ \w]*)")
_ANSWER = re.compile(r"<Code>([^<]*)</Code>(?:.*?<Message>([^<]*)</Message>)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits and retries of single requests."""

    connect_seconds: float = 5.0
    request_seconds: float = 30.0
    """The time limit of a request with its body, at most one part (16 MiB, more only for files above 140 GiB)."""
    retries: int = 5
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 10.0
    retry_seconds: float = 120.0
    """The time after which a request is not retried."""


class ObjectStorage:
    """A prefix of a bucket; thread-safe."""

    def __init__(self, uri: str, limits: Limits | None = None) -> None:
        """Parse `uri`, like `s3://bucket/prefix`, without any request. Raises UserError if it names no bucket."""
        self._scheme, _, path = uri.partition("://")
        self._bucket, _, prefix = path.partition("/")
        self._prefix = prefix.strip("/")
        self._limits = limits = limits or Limits()
        if not _BUCKET.fullmatch(self._bucket):
            raise UserError(
                f"checkpoint.path {uri}: {self._bucket!r} is not a bucket's name: write {self._scheme}://bucket/prefix"
            )
        try:
            from obstore.store import from_url  # noqa: PLC0415 - an optional package
        except ImportError as error:
            raise UserError(
                f"checkpoint.path is {uri}, and the package obstore is not installed: pip install "
                "'trainium-trainer[s3]'"
            ) from error
        self.location = f"{self._scheme}://{self._bucket}/{self._prefix}".rstrip("/")
        endpoints = [value for name, value in os.environ.items() if "ENDPOINT" in name]
        with _translate_errors(self.location):
            self._store: ObjectStore = from_url(
                self.location,
                client_options={
                    "allow_http": any(value.startswith("http://") for value in endpoints),
                    "connect_timeout": timedelta(seconds=limits.connect_seconds),
                    "timeout": timedelta(seconds=limits.request_seconds),
                },
                retry_config={
                    "max_retries": limits.retries,
                    "retry_timeout": timedelta(seconds=limits.retry_seconds),
                    "backoff": {
                        "init_backoff": timedelta(seconds=limits.first_pause_seconds),
                        "max_backoff": timedelta(seconds=limits.longest_pause_seconds),
                    },
                },
            )

    def prepare(self) -> None:
        """Check that the bucket exists and can be accessed."""
        with _translate_errors(self.location):
            self._store.list_with_delimiter("")

    def list(self, folder: str) -> list[Entry]:
        """Return all names below a prefix."""
        with _translate_errors(folder):
            listing = self._store.list_with_delimiter(folder)
        entries = [Entry(path.rstrip("/").rpartition("/")[2], 0, True, 0.0) for path in listing["common_prefixes"]]
        entries += [
            Entry(meta["path"].rpartition("/")[2], meta["size"], False, meta["last_modified"].timestamp())
            for meta in listing["objects"]
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def read(self, name: str) -> bytes:
        """Read a small object."""
        with _translate_errors(name):
            return bytes(self._store.get(name).bytes())

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` from a range of an object."""
        if not len(target):
            return
        with _translate_errors(name):
            data = self._store.get_range(name, start=start, length=len(target))
        if len(data) != len(target):
            raise DamagedFileError(f"{name} ends too early")
        target[:] = cast("memoryview", data)

    def write(self, name: str, data: bytes) -> None:
        """Put a small object."""
        with _translate_errors(name):
            self._store.put(name, data, use_multipart=False)

    def create(self, name: str, data: bytes) -> None:
        """Put a small object unless it exists."""
        with _translate_errors(name):
            self._store.put(name, data, mode="create", use_multipart=False)

    def write_stream(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        """Upload in several parts, a few at a time."""
        part = max(_PART_BYTES, -(-size // _MAX_PARTS))
        try:
            with _translate_errors(name):
                self._store.put(name, iter(pieces), chunk_size=part, max_concurrency=_UPLOADS_AT_ONCE)
        except FileNotFoundError:
            # The upload, not the file, is missing: something aborted it, for instance a rule of the bucket.
            raise OSError(errno.EIO, "the upload is gone", name) from None

    def remove_file(self, name: str) -> None:
        """Delete an object."""
        with _translate_errors(name):
            self._store.delete(name)

    def remove_files(self, folder: str, should_remove: Callable[[str], bool]) -> None:
        """Delete the accepted objects directly below a prefix; there are no drafts and no folders."""
        names = [
            f"{folder}/{entry.name}" for entry in self.list(folder) if not entry.is_folder and should_remove(entry.name)
        ]
        with _translate_errors(folder):
            for start in range(0, len(names), _DELETES_AT_ONCE):
                self._store.delete(names[start : start + _DELETES_AT_ONCE])

    def iterate_parents(self) -> Iterator[ObjectStorage]:
        """Yield the parent prefixes, the nearest first, the whole bucket last."""
        prefix = self._prefix
        while prefix:
            prefix = prefix.rpartition("/")[0]
            yield ObjectStorage(f"{self._scheme}://{self._bucket}/{prefix}", self._limits)

    def remove_drafts(self) -> None:
        """Do nothing: an incomplete object does not exist."""


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Raise the package's errors as OSError, without the quoted request and response."""
    from obstore import exceptions  # noqa: PLC0415 - an optional package

    try:
        yield
    except FileNotFoundError as error:
        raise _create_error(name, str(error), errno.ENOENT) from None
    except exceptions.AlreadyExistsError as error:
        raise _create_error(name, str(error), errno.EEXIST) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise _create_error(name, str(error), errno.EACCES) from None
    except exceptions.BaseError as error:
        text = str(error)
        if "InvalidRange" in text:
            raise DamagedFileError(f"{name} ends too early") from None
        raise _create_error(name, text, _choose_error_number(text)) from None


def _choose_error_number(text: str) -> int:
    """Return the error number that best matches the package's error."""
    if "TimedOut" in text or "kind: Timeout" in text:
        return errno.ETIMEDOUT
    status = _STATUS.search(text)
    return errno.EACCES if status is not None and status.group(1)[:3] in ("401", "403") else errno.EIO


def _create_error(name: str, text: str, number: int) -> OSError:
    """Return the error to raise; OSError selects the subclass."""
    if "NoSuchBucket" in text:
        return OSError(errno.ENODEV, "the bucket does not exist", name)
    if number in (errno.ENOENT, errno.EEXIST):
        return OSError(number, os.strerror(number), name)
    return OSError(
        number, "the store did not answer in time" if number == errno.ETIMEDOUT else _format_reason(text), name
    )


def _format_reason(text: str) -> str:
    """Return the store's error code and text, or the kind of failure; never the quoted request."""
    if match := _ANSWER.search(text):
        return ": ".join(part for part in match.groups() if part)
    if status := _STATUS.search(text):
        return f"the store answered {status.group(1).strip()}"
    return "the store cannot be reached" if "HTTP error" in text else "the store refused"
