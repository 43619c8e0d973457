"""Open a stream to the coordinator, and send and receive its frames (`trainium_contract.wire.stream`).

Opening resolves the coordinator's names, verifies its certificate and sends the pod's token.

Guarantees:
- Token and certificate authority are read again whenever they may have changed.
- An address that does not answer as the leader raises CoordinatorUnavailableError with one sentence.
- A name that does not resolve in time keeps its last addresses: the server there proves by certificate that it is the
  coordinator.
- At most one lookup of a name is pending, and none keeps the agent from leaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from pydantic import BaseModel, ValidationError

from trainium_contract.wire.messages import ErrorResponse, RegisterRequest, RegisterResponse
from trainium_contract.wire.stream import HEAD_BYTES, STREAM_PATH, UPGRADE, FrameKind, encode_frame, parse_frame_header

if TYPE_CHECKING:
    from trainium_agent.settings import AgentSettings, Endpoint

REQUEST_SECONDS = 3.0
"""Time limit of a request."""
_JOB_DELETED = 410
_FORBIDDEN = 403
LOOKUP_SECONDS = 1.5
"""Time limit of a lookup when addresses are known already. A resolver gives up a silent name server after 10 s for each
search domain.
"""
_SWITCHING = 101
_MAX_HEAD_BYTES = 16 * 1024
_MAX_REFUSAL_BYTES = 64 * 1024
_MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Enough for a membership of 100,000 workers."""
_TLS_SHUTDOWN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Address:
    """One address of the coordinator, with the name that its certificate must have."""

    host: str
    ip: str
    port: int

    def __str__(self) -> str:
        return f"{self.host} at {self.ip}:{self.port}"


class CoordinatorUnavailableError(ConnectionError):
    """One address did not answer as the leader; the text is one sentence."""


class CertificateError(CoordinatorUnavailableError):
    """The certificate of one address does not verify, maybe because its authority was rotated."""


class PodRefusedError(CoordinatorUnavailableError):
    """The leader answered that this pod is no worker of any job, as after `kubectl delete --cascade=orphan`."""


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

    async def resolve_addresses(self) -> list[Address]:
        """Return the addresses of all endpoints, in the resolver's order. Raises CoordinatorUnavailableError."""
        addresses: dict[Address, None] = {}
        for endpoint in self._settings.coordinator:
            for ip in await self._resolve(endpoint):
                addresses[Address(endpoint.host, ip, endpoint.port)] = None
        if not addresses:
            names = ", ".join(endpoint.host for endpoint in self._settings.coordinator)
            raise CoordinatorUnavailableError(f"the coordinator's name {names} does not resolve")
        return list(addresses)

    async def open_stream(self, address: Address, query: dict[str, str]) -> Stream:
        """Open a stream to one address. Raises CoordinatorUnavailableError, JobDeletedError."""
        try:
            token = self._settings.token_path.read_text(encoding="utf-8").strip()
            async with asyncio.timeout(REQUEST_SECONDS):
                return await Stream.open(
                    (address.ip, address.port),
                    self._create_tls_context(),
                    address.host,
                    f"GET {STREAM_PATH}?{urlencode(query)} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
                    f"Connection: Upgrade\r\nUpgrade: {UPGRADE}\r\nAuthorization: Bearer {token}\r\n\r\n",
                )
        except StreamRefusedError as error:
            sentence = _describe_refusal(address, error.status, error.body)
            raise _REFUSALS.get(error.status, CoordinatorUnavailableError)(sentence) from error
        except ssl.SSLError as error:
            self._tls = None  # read the certificate authority again: it may have been rotated
            raise CertificateError(
                f"the certificate of {address.host} does not verify against {self._settings.ca_path} ({error})"
            ) from error
        except (OSError, ValueError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise CoordinatorUnavailableError(f"{address}: {reason}") from error

    async def _resolve(self, endpoint: Endpoint) -> list[str]:
        """Return the name's addresses in the resolver's order; empty if it has never resolved."""
        lookup = self._lookups.get(endpoint)
        if lookup is None:
            lookup = self._lookups[endpoint] = _start_lookup(endpoint)
        addresses = self._known.get(endpoint, [])
        done, _ = await asyncio.wait({lookup}, timeout=LOOKUP_SECONDS if addresses else None)
        if done:
            self._lookups.pop(endpoint, None)
            addresses = lookup.result() or addresses
            self._known[endpoint] = addresses
        return addresses

    def _create_tls_context(self) -> ssl.SSLContext:
        """Return a TLS context that trusts only the mounted certificate authority, read now."""
        ca = self._settings.ca_path.read_bytes()
        if self._tls is None or ca != self._ca:
            self._tls = ssl.create_default_context(cadata=ca.decode("ascii"))
            self._ca = ca
        return self._tls


_REFUSALS: dict[int, type[Exception]] = {_JOB_DELETED: JobDeletedError, _FORBIDDEN: PodRefusedError}


def _describe_refusal(address: Address, status: int, body: str) -> str:
    try:
        sentence = ErrorResponse.model_validate_json(body).error
    except ValidationError:
        sentence = f"an answer that is not understood: {body[:200]!r}"
    if status in (401, _FORBIDDEN):
        return f"{address} refused this pod's token ({status}): {sentence}"
    return f"{address} answered {status}: {sentence}"


def _start_lookup(endpoint: Endpoint) -> asyncio.Future[list[str]]:
    """Resolve in a separate thread, because the event loop waits at its end for the threads of its pool.

    The result is empty for a name that does not resolve.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[str]] = loop.create_future()

    def resolve() -> None:
        addresses: list[str] = []
        with contextlib.suppress(OSError, UnicodeError):  # unknown or invalid name
            entries = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            addresses = [str(entry[4][0]) for entry in entries]
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set_result, future, addresses)

    threading.Thread(target=resolve, name="coordinator-lookup", daemon=True).start()
    return future


def _set_result(future: asyncio.Future[list[str]], addresses: list[str]) -> None:
    if not future.done():
        future.set_result(addresses)


class StreamRefusedError(Exception):
    """The coordinator answered the request with something other than a stream."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"a stream was answered with {status}")
        self.status = status
        self.body = body


class StreamEndedError(CoordinatorUnavailableError):
    """The coordinator ended the stream, or the connection broke; the text is one sentence."""


class Stream:
    """An open stream; the caller closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: tuple[str, int], context: ssl.SSLContext, name: str, request: str) -> Stream:
        """Connect and send the request. Raises StreamRefusedError, OSError, ValueError."""
        reader, writer = await asyncio.open_connection(
            *address,
            ssl=context,
            server_hostname=name,
            limit=_MAX_HEAD_BYTES,
            ssl_shutdown_timeout=_TLS_SHUTDOWN_SECONDS,
        )
        stream = cls(reader, writer)
        try:
            writer.write(request.encode())
            await stream._await_upgrade()
        except asyncio.IncompleteReadError as error:
            stream.close()
            raise ConnectionResetError("the connection was closed") from error
        except BaseException:
            stream.close()
            raise
        return stream

    async def _await_upgrade(self) -> None:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as error:
            raise ValueError("the answer is no HTTP") from error
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1]) if lines[0].count(" ") else 0
        if status == _SWITCHING:
            return
        fields = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:])}
        length = min(int(fields.get("content-length", "0")), _MAX_REFUSAL_BYTES)
        body = await self._reader.readexactly(length) if length else b""
        raise StreamRefusedError(status, body.decode(errors="replace"))

    async def register(self, request: RegisterRequest, seconds: float) -> RegisterResponse:
        """Register this agent. Raises StreamEndedError, after which the stream is closed."""
        try:
            async with asyncio.timeout(seconds):
                return await self._send_registration(request)
        except (TimeoutError, ValidationError) as error:
            self.close()
            raise StreamEndedError(f"the registration was not answered ({type(error).__name__})") from error
        except BaseException:
            self.close()
            raise

    async def _send_registration(self, request: RegisterRequest) -> RegisterResponse:
        await self.send(FrameKind.REGISTER, request)
        while True:
            kind, payload = await self.receive()
            if kind == FrameKind.REGISTERED:
                return RegisterResponse.model_validate_json(payload)
            if kind == FrameKind.ERROR:
                raise StreamEndedError(format_refusal(parse_refusal(payload)))

    async def send(self, kind: FrameKind, message: BaseModel | bytes) -> None:
        """Send one frame. Raises StreamEndedError."""
        payload = (
            message
            if isinstance(message, bytes)
            else message.model_dump_json(by_alias=True, exclude_none=True).encode()
        )
        try:
            self._writer.write(encode_frame(kind, payload))
            await self._writer.drain()
        except OSError as error:
            raise StreamEndedError(f"the connection broke ({error or type(error).__name__})") from error

    async def receive(self) -> tuple[int, bytes]:
        """Return the next frame; a packed membership is unpacked. Raises StreamEndedError."""
        try:
            kind, length = parse_frame_header(await self._reader.readexactly(HEAD_BYTES))
            if length > _MAX_FRAME_BYTES:
                raise StreamEndedError(f"the coordinator sent a frame of {length} bytes")
            payload = await self._reader.readexactly(length)
            if kind == FrameKind.PACKED_MEMBERSHIP:
                return FrameKind.MEMBERSHIP, gzip.decompress(payload)
        except asyncio.IncompleteReadError as error:
            raise StreamEndedError("the coordinator closed the stream") from error
        except (OSError, EOFError, zlib.error) as error:
            raise StreamEndedError(f"the connection broke ({error or type(error).__name__})") from error
        return kind, payload

    def close(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()


def parse_refusal(payload: bytes) -> ErrorResponse:
    """Parse a refusal. Raises StreamEndedError when it is malformed."""
    try:
        return ErrorResponse.model_validate_json(payload)
    except ValidationError as error:
        raise StreamEndedError("the coordinator refused with something that is not understood") from error


def format_refusal(refusal: ErrorResponse) -> str:
    """Return a refusal as the end of a sentence."""
    return f"the coordinator answered {refusal.status}: {refusal.error}"
