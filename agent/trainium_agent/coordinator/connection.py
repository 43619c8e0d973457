"""Connections to the coordinator: the addresses of its names, TLS, and the pod's token.

Guarantees:
- Token and certificate authority are read again whenever they may have changed.
- Every way in which an address does not answer as the leader does is a CoordinatorUnavailableError with one sentence.
- A name that does not resolve, or not soon, keeps its last addresses: the server there proves by certificate that
  it is the coordinator. At most one look-up of a name is under way, and none keeps the agent from leaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from pydantic import ValidationError

from trainium_agent.coordinator.stream import Stream, StreamRefusedError
from trainium_contract.wire.messages import ErrorResponse
from trainium_contract.wire.stream import STREAM_PATH, UPGRADE

if TYPE_CHECKING:
    from trainium_agent.settings import AgentSettings, Endpoint

REQUEST_SECONDS = 3.0
"""Until an answer."""
_JOB_DELETED = 410
LOOKUP_SECONDS = 1.5
"""Until a name whose addresses are known keeps them. A resolver gives up a silent name server after 10 s for each
search domain."""


@dataclass(frozen=True, slots=True)
class Address:
    """One address of the coordinator, with the name that its certificate must bear."""

    host: str
    ip: str
    port: int

    def __str__(self) -> str:
        return f"{self.host} at {self.ip}:{self.port}"


class CoordinatorUnavailableError(ConnectionError):
    """One address did not answer as the leader does; the text is one sentence."""


class JobDeletedError(Exception):
    """The leader answered that this pod's job no longer exists."""


class Connector:
    """Opens streams to the coordinator."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._tls: ssl.SSLContext | None = None
        self._ca = b""
        self._known: dict[Endpoint, list[str]] = {}
        self._lookups: dict[Endpoint, asyncio.Future[list[str]]] = {}

    async def addresses(self) -> list[Address]:
        """Return every address of every endpoint, in the resolver's order.

        Raises CoordinatorUnavailableError where there are none.
        """
        found: dict[Address, None] = {}
        for endpoint in self._settings.coordinator:
            for ip in await self._resolve(endpoint):
                found[Address(endpoint.host, ip, endpoint.port)] = None
        if not found:
            names = ", ".join(endpoint.host for endpoint in self._settings.coordinator)
            raise CoordinatorUnavailableError(f"the coordinator's name {names} does not resolve")
        return list(found)

    async def open_stream(self, address: Address, query: dict[str, str]) -> Stream:
        """Open a stream to one address. Raises CoordinatorUnavailableError, JobDeletedError."""
        try:
            token = self._settings.token_path.read_text(encoding="utf-8").strip()
            async with asyncio.timeout(REQUEST_SECONDS):
                return await Stream.open(
                    (address.ip, address.port),
                    self._context(),
                    address.host,
                    f"GET {STREAM_PATH}?{urlencode(query)} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
                    f"Connection: Upgrade\r\nUpgrade: {UPGRADE}\r\nAuthorization: Bearer {token}\r\n\r\n",
                )
        except StreamRefusedError as error:
            sentence = _refusal(address, error.status, error.body)
            raise (JobDeletedError if error.status == _JOB_DELETED else CoordinatorUnavailableError)(
                sentence
            ) from error
        except ssl.SSLError as error:
            self._tls = None  # read the certificate authority again: it may have been rotated
            raise CoordinatorUnavailableError(
                f"the certificate of {address.host} does not verify against {self._settings.ca_path} ({error})"
            ) from error
        except (OSError, ValueError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise CoordinatorUnavailableError(f"{address}: {reason}") from error

    async def _resolve(self, endpoint: Endpoint) -> list[str]:
        """Return the name's addresses in the resolver's order; none where it has never resolved."""
        lookup = self._lookups.get(endpoint)
        if lookup is None:
            lookup = self._lookups[endpoint] = _start_lookup(endpoint)
        known = self._known.get(endpoint, [])
        done, _ = await asyncio.wait({lookup}, timeout=LOOKUP_SECONDS if known else None)
        if done:
            self._lookups.pop(endpoint, None)
            known = lookup.result() or known
            self._known[endpoint] = known
        return known

    def _context(self) -> ssl.SSLContext:
        """Return TLS that trusts the mounted certificate authority only, as of now."""
        ca = self._settings.ca_path.read_bytes()
        if self._tls is None or ca != self._ca:
            self._tls = ssl.create_default_context(cadata=ca.decode("ascii"))
            self._ca = ca
        return self._tls


def _refusal(address: Address, status: int, body: str) -> str:
    try:
        sentence = ErrorResponse.model_validate_json(body).error
    except ValidationError:
        sentence = f"an answer that is not understood: {body[:200]!r}"
    if status in (401, 403):
        return f"{address} refused this pod's token ({status}): {sentence}"
    return f"{address} answered {status}: {sentence}"


def _start_lookup(endpoint: Endpoint) -> asyncio.Future[list[str]]:
    """Resolve in a separate thread, because the event loop waits at its end for the threads of its pool.

    The result is empty for a name that does not resolve.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[str]] = loop.create_future()

    def resolve() -> None:
        found: list[str] = []
        with contextlib.suppress(OSError, UnicodeError):  # no such name; not a valid name
            entries = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            found = [str(entry[4][0]) for entry in entries]
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set_result, future, found)

    threading.Thread(target=resolve, name="coordinator-lookup", daemon=True).start()
    return future


def _set_result(future: asyncio.Future[list[str]], found: list[str]) -> None:
    if not future.done():
        future.set_result(found)
