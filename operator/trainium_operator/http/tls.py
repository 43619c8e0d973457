"""Serve TLS with a certificate that changes while the server runs.

Guarantees:
- The context is the same object for the lifetime of the process: a new certificate serves new connections and leaves
  the others alone.
- A chain and a key that do not match are never loaded; until they do, the last valid pair serves.
- Keys are never written to a file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""A kubelet takes about a minute to update a mounted Secret."""
MAX_FILE_BYTES = 1024 * 1024
"""The largest value that a Secret can hold."""


class UnusableCertificateError(ValueError):
    """Not a certificate, not a key, or a pair that does not match."""


class ServerTls:
    """A TLS context whose certificate can be replaced."""

    def __init__(self) -> None:
        self.context = _load_context()
        self.loaded = asyncio.Event()
        """A certificate is in `context`."""

    def load(self, certificate: bytes, key: bytes) -> None:
        """Serve with this chain and key in PEM. Raises UnusableCertificateError and keeps the last pair."""
        with _memory_file(certificate) as chain_path, _memory_file(key) as key_path:
            for context in (_load_context(), self.context):  # a trial first: a failure leaves a context half loaded
                try:
                    context.load_cert_chain(chain_path, key_path, password="")
                except (ssl.SSLError, ValueError) as error:
                    raise UnusableCertificateError(f"certificate and key cannot be used ({error})") from error
        self.loaded.set()


def _load_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # an agent connects once, and two session tickets cost a quarter of a handshake
    return context


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """Yield a path at which `ssl` can read the bytes; it is in memory, so a read-only file system is no problem."""
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class CertificateFolder:
    """Serves the pair in a mounted Secret of type `kubernetes.io/tls`, as cert-manager writes it."""

    def __init__(self, folder: str) -> None:
        self.tls = ServerTls()
        self._folder = Path(folder)
        self._held: tuple[bytes, bytes] | None = None
        self._warned = ""

    async def run(self) -> None:
        """Refresh periodically until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(CHECK_SECONDS)

    async def refresh(self) -> None:
        """Load the pair in the folder if it is a new and valid one; the bounded read runs in a thread."""
        try:
            pair = await asyncio.to_thread(_read, self._folder)
            if pair == self._held:
                return
            self.tls.load(*pair)
        except (OSError, UnusableCertificateError) as error:
            problem = f"{self._folder}: {error}; a pair tls.crt and tls.key is needed there"
            if problem != self._warned:
                logger.warning("certificate: %s", problem)
            self._warned = problem
            return
        logger.info("serving with the certificate in %s", self._folder)
        self._held, self._warned = pair, ""


def _read(folder: Path) -> tuple[bytes, bytes]:
    """Return the chain and the key. Raises OSError."""
    return _read_bounded(folder / "tls.crt"), _read_bounded(folder / "tls.key")


def _read_bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES)
