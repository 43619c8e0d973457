"""A certificate that others keep in a folder: a mounted Secret of type `kubernetes.io/tls`, as cert-manager writes it.

Invariants: the folder is read anew every `CHECK_SECONDS`, off the loop and bounded; what is missing or does not fit
together, as in the midst of a change, is told and tried again, and until then the last good one serves.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from trainium_operator.entrance.tls import ServerTls, UnusableCertificateError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""A kubelet takes about a minute to bring a changed Secret."""
LARGEST_FILE = 1024 * 1024
"""Of what a Secret can hold."""


class MountedCertificate:
    """`run` beside the rest; `tls.loaded` says that there was one."""

    def __init__(self, folder: str) -> None:
        self.tls = ServerTls()
        self._folder = Path(folder)
        self._held: tuple[bytes, bytes] | None = None
        self._told = ""

    async def run(self) -> None:
        """Look now and then until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(CHECK_SECONDS)

    async def refresh(self) -> None:
        """Take what is in the folder now, if it is another pair that can be used."""
        try:
            found = await asyncio.to_thread(_read, self._folder)
            if found == self._held:
                return
            self.tls.load(*found)
        except (OSError, UnusableCertificateError) as error:
            self._tell(f"{self._folder}: {error}; a pair tls.crt and tls.key is needed there")
            return
        logger.info("serving with the certificate in %s", self._folder)
        self._held, self._told = found, ""

    def _tell(self, problem: str) -> None:
        """Once, until it is another."""
        if problem != self._told:
            logger.warning("certificate: %s", problem)
        self._told = problem


def _read(folder: Path) -> tuple[bytes, bytes]:
    """Chain and key. Raises OSError."""
    return _bounded(folder / "tls.crt"), _bounded(folder / "tls.key")


def _bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LARGEST_FILE)
