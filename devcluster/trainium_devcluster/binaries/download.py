"""Download an official release file, check it and install the program.

Guarantees:
- No file appears under its final name before its checksum is verified.
- It cannot hang: opening a connection, each read, and the whole download have time limits.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import queue
import re
import shutil
import tarfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_devcluster.binaries.catalog import Release


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of a download, in seconds."""

    open: float = 6.0
    """Limit of name lookup, connection, TLS and the first answer together."""
    read: float = 10.0
    """Longest pause between two pieces of data."""
    total: float = 900.0


class DownloadError(Exception):
    """The release could not be downloaded; the message has the reason."""


class UnreachableError(DownloadError):
    """The host did not respond, so other downloads need not be tried."""


def download_program(release: Release, target: Path, limits: Limits | None = None) -> None:
    """Fetch, verify and unpack a release to `target` (mode 0755); raises DownloadError, without leaving files."""
    limits = limits or Limits()
    expected = release.sha256 or _fetch_checksum(release, limits)
    archive = target.with_name(f".{target.name}.{os.getpid()}.download")
    unpacked = target.with_name(f".{target.name}.{os.getpid()}.unpacked")
    try:
        actual = _fetch(release.url, archive, limits)
        if actual != expected:
            raise DownloadError(f"the checksum of {release.url} is {actual[:12]}..., expected {expected[:12]}...")
        if release.member is None:
            archive.replace(unpacked)
        else:
            _extract(archive, release.member, unpacked)
        unpacked.chmod(0o755)
        unpacked.replace(target)
    except OSError as error:
        raise DownloadError(f"{release.url} cannot be stored: {error}") from error
    finally:
        archive.unlink(missing_ok=True)
        unpacked.unlink(missing_ok=True)


def _fetch_checksum(release: Release, limits: Limits) -> str:
    if release.sha256_url is None:
        raise DownloadError(f"no checksum is known for {release.url}")
    with _open(release.sha256_url, limits) as response:
        try:
            text = response.read(4096).decode("ascii", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise DownloadError(f"{release.sha256_url} broke off: {error}") from error
    name = release.url.rpartition("/")[2]
    for checksum, file in re.findall(r"^([0-9a-f]{64})(?:[ \t]+\*?(\S+))?[ \t]*$", text, re.MULTILINE):
        if file in {"", name}:
            return str(checksum)
    raise DownloadError(f"{release.sha256_url} holds no SHA-256 checksum of {name}")


def _fetch(url: str, target: Path, limits: Limits) -> str:
    """Store the file and return its SHA-256."""
    digest = hashlib.sha256()
    deadline = time.monotonic() + limits.total
    with _open(url, limits) as response, target.open("wb") as file:
        while True:
            try:
                piece = response.read(1 << 18)
            except (OSError, http.client.HTTPException) as error:
                raise DownloadError(f"{url} broke off: {error}") from error
            if not piece:
                return digest.hexdigest()
            digest.update(piece)
            file.write(piece)
            if time.monotonic() > deadline:
                raise DownloadError(f"{url} took longer than {limits.total:.0f} s")


def _open(url: str, limits: Limits) -> BinaryIO:
    """Open a URL within `limits.open` seconds, in a thread because a name lookup has no timeout."""
    responses: queue.Queue[BinaryIO | Exception] = queue.Queue()

    def work() -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "trainium-devcluster"})  # noqa: S310 - from the catalog
        try:
            responses.put(cast("BinaryIO", urllib.request.urlopen(request, timeout=limits.read)))  # noqa: S310 - as above
        except Exception as error:  # noqa: BLE001 - every error is judged below
            responses.put(error)

    threading.Thread(target=work, name="open-url", daemon=True).start()
    try:
        response = responses.get(timeout=limits.open)
    except queue.Empty:
        raise UnreachableError(f"{url} did not answer within {limits.open:.0f} s") from None
    if isinstance(response, urllib.error.HTTPError):
        with response:
            raise DownloadError(f"{url} answered {response.code} {response.reason}") from response
    if isinstance(response, urllib.error.URLError):
        raise UnreachableError(f"{url} cannot be reached: {response.reason}") from response
    if isinstance(response, Exception):
        raise UnreachableError(f"{url} cannot be reached: {response}") from response
    return response


def _extract(archive: Path, member: str, target: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            source = tar.extractfile(member)
            if source is None:
                raise DownloadError(f"{archive.name} holds {member} as something that is not a file")
            with source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise DownloadError(f"{archive.name} is not an archive with {member} in it: {error}") from error
