"""Keep the coordinator's certificates in a Secret that all replicas share, and load them into the running server.

Guarantees:
- Only the leader writes, and only over the version that it read; followers load the stored certificates.
- Keys are in memory and in the Secret, never in a file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from trainium_operator.coordinator.certificates import Material, UnusableMaterialError, renew_material
from trainium_operator.http.tls import ServerTls, UnusableCertificateError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

CHECK_SECONDS = 60.0
FIRST_CHECK_SECONDS = 1.0


class SecretConflictError(Exception):
    """Another process wrote the Secret since it was read."""


class SecretUnavailableError(Exception):
    """The Secret is missing or cannot be reached; the message has the remedy."""


class SecretStore(Protocol):
    """One Secret."""

    async def read(self) -> tuple[Mapping[str, bytes], str]:
        """Return content and version. Raises SecretUnavailableError."""
        ...

    async def write(self, data: Mapping[str, bytes], version: str) -> str:
        """Replace that version; return the new one. Raises SecretConflictError and SecretUnavailableError."""
        ...


class CertificateKeeper:
    """Renews and loads the certificates: `refresh` once at start, then `run`."""

    def __init__(
        self,
        secret: SecretStore,
        names: Sequence[str],
        *,
        wall_clock: Callable[[], float],
        on_new_bundle: Callable[[], None] = lambda: None,
    ) -> None:
        self.tls = ServerTls()
        self._secret = secret
        self._names = tuple(names)
        self._wall_clock = wall_clock
        self._on_new_bundle = on_new_bundle
        self._material: Material | None = None
        self._check = asyncio.Event()

    @property
    def ca_bundle(self) -> str:
        """PEM of the authorities that agents must trust; empty before the first certificate."""
        return self._material.ca_bundle.decode() if self._material else ""

    async def run(self, is_leader: Callable[[], bool]) -> None:
        """Refresh periodically until cancelled; only the leader writes."""
        while True:
            try:
                await self.refresh(write=is_leader())
            except SecretConflictError:
                continue  # another replica was faster: read again
            except SecretUnavailableError as error:
                logger.warning("certificates: %s", error)
            self._check.clear()
            pause = CHECK_SECONDS if self.tls.loaded.is_set() else FIRST_CHECK_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._check.wait()

    def check_now(self) -> None:
        """Refresh at once: this process has just become the leader."""
        self._check.set()

    async def refresh(self, *, write: bool) -> None:
        """Read the Secret, renew expiring certificates if `write`, load new ones.

        Raises SecretConflictError and SecretUnavailableError.
        """
        data, version = await self._secret.read()
        try:
            held = Material.from_data(data)
        except UnusableMaterialError as error:
            logger.warning(
                "the certificates in the Secret are unusable (%s)%s", error, "; created again" if write else ""
            )
            held = None
        if write:
            fresh = renew_material(held, self._names, self._wall_clock())
            if fresh != held:
                await self._secret.write(fresh.encode(), version)
                logger.info(
                    "renewed the coordinator's certificates" if held else "created the coordinator's certificates"
                )
            held = fresh
        if held is not None and held != self._material:
            self._load(held)

    def _load(self, material: Material) -> None:
        try:
            self.tls.load(material.server_cert, material.server_key)
        except UnusableCertificateError as error:
            logger.warning("the certificate in the Secret: %s", error)
            return
        old, self._material = self._material, material
        if old is None or old.ca_bundle != material.ca_bundle:
            self._on_new_bundle()
