"""Connect a simulated agent to the coordinator, and split its frames as bytes arrive."""

from __future__ import annotations

import asyncio
import functools
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from trainium_contract.wire.stream import STREAM_PATH, UPGRADE, FrameKind, FrameReader, encode_frame

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

_MAX_FRAME_BYTES = 1 << 26
_GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address, and the name that its certificate must have."""

    ip: str
    port: int
    name: str
    context: ssl.SSLContext


class DisconnectedError(Exception):
    """The coordinator at this address refused the agent."""


class StreamConnection(asyncio.Protocol):
    """The connection of an agent; `closed` resolves to the status of a refusal, or to 0 if the connection broke."""

    def __init__(self, on_frame: Callable[[int, bytes], None]) -> None:
        self._on_frame = on_frame
        self._reader = FrameReader(_MAX_FRAME_BYTES)
        self._head = b""
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[int] = loop.create_future()

    async def open(self, endpoint: Endpoint, headers: Mapping[str, str], query: Mapping[str, str | int]) -> None:
        """Connect, and wait for status 101 or for `closed`; raise OSError if it cannot connect."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(
            lambda: self, endpoint.ip, endpoint.port, ssl=endpoint.context, server_hostname=endpoint.name
        )
        lines = {"Host": f"{endpoint.name}:{endpoint.port}", "Connection": "Upgrade", "Upgrade": UPGRADE, **headers}
        head = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
        assert self._transport is not None
        self._transport.write(f"GET {STREAM_PATH}?{urlencode(query)} HTTP/1.1\r\n{head}\r\n".encode())
        first_of: set[asyncio.Future[Any]] = {self.opened, self.closed}
        await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame."""
        if self._transport is not None:
            self._transport.write(encode_frame(kind, payload))

    def end(self, status: int) -> None:
        """Close the connection, with the status of the refusal."""
        if not self.closed.done():
            self.closed.set_result(status)
        self.close()

    def close(self) -> None:
        """Abort the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implement asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _exc: BaseException | None) -> None:
        """Implement asyncio.Protocol."""
        self._transport = None
        self.end(0)

    def data_received(self, data: bytes) -> None:
        """Implement asyncio.Protocol."""
        if not self.opened.done():
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            status = int(head[9:12])
            if status != 101:
                self.end(status)
                return
            self.opened.set_result(None)
        for kind, payload in self._reader.split_frames(data):
            if kind == FrameKind.PACKED_MEMBERSHIP:
                self._on_frame(FrameKind.MEMBERSHIP, _decompress(payload))
            else:
                self._on_frame(kind, payload)


@functools.lru_cache(maxsize=1)
def _decompress(data: bytes) -> bytes:
    """Decompress a membership once; real agents do that on separate machines."""
    return zlib.decompress(data, _GZIP_WINDOW_BITS)
