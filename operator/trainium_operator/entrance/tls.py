"""The TLS context of a server whose certificate changes while it runs.

Invariants: the context is the same object for the life of the process: a new certificate serves new connections and
leaves the others alone; what does not fit together is never loaded. Keys are never written to a file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class UnusableCertificateError(ValueError):
    """Not a certificate, not a key, or not of each other."""


class ServerTls:
    """`load` as often as there is another certificate."""

    def __init__(self) -> None:
        self.context = _context()
        self.loaded = asyncio.Event()
        """A certificate is in `context`."""

    def load(self, certificate: bytes, key: bytes) -> None:
        """Serve with this chain and key, PEM. Raises UnusableCertificateError, and then goes on with what it had."""
        with _as_file(certificate) as chain_path, _as_file(key) as key_path:
            for context in (_context(), self.context):  # the first only tries: a failure leaves half of it behind
                try:
                    context.load_cert_chain(chain_path, key_path, password="")
                except (ssl.SSLError, ValueError) as error:
                    raise UnusableCertificateError(f"certificate and key cannot be used ({error})") from error
        self.loaded.set()


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # agents come once and stay: two tickets for each would be a quarter of a handshake's work
    return context


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path at which `ssl` can read this; in memory only, so it works on a read-only file system too."""
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
