"""An agent's stream, cheaply: bytes are taken where they come in, so that thousands do not measure themselves."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from benchmarks.fleetlab.agents.wire import GZIP
from trainium_contract.wire.stream import STREAM_PATH, UPGRADE, FrameKind, FrameReader, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.fleetlab.agents.wire import Endpoint

_LONGEST = 1 << 26


class StreamWire(asyncio.Protocol):
    """One connection; `lost` ends with the status that it was refused with, 0 when it broke."""

    def __init__(self, on_frame: Callable[[int, bytes], None]) -> None:
        self._on_frame = on_frame
        self._reader = FrameReader(_LONGEST)
        self._head = b""
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[int] = loop.create_future()

    async def open(self, endpoint: Endpoint, headers: Mapping[str, str], query: Mapping[str, str | int]) -> None:
        """Connect and be answered with 101, or have `lost` tell; raises OSError."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(
            lambda: self, endpoint.ip, endpoint.port, ssl=endpoint.context, server_hostname=endpoint.name
        )
        lines = {"Host": f"{endpoint.name}:{endpoint.port}", "Connection": "Upgrade", "Upgrade": UPGRADE, **headers}
        head = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
        assert self._transport is not None
        self._transport.write(f"GET {STREAM_PATH}?{urlencode(query)} HTTP/1.1\r\n{head}\r\n".encode())
        ends: set[asyncio.Future[Any]] = {self.opened, self.lost}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """One frame."""
        if self._transport is not None:
            self._transport.write(frame(kind, payload))

    def end(self, status: int) -> None:
        """It is of no use any more."""
        if not self.lost.done():
            self.lost.set_result(status)
        self.close()

    def close(self) -> None:
        """At once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self.end(0)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if not self.opened.done():
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            status = int(head[9:12])
            if status != 101:
                self.end(status)
                return
            self.opened.set_result(None)
        for kind, payload in self._reader.frames(data):
            if kind == FrameKind.PACKED_MEMBERSHIP:
                self._on_frame(FrameKind.MEMBERSHIP, _unpacked(payload))
            else:
                self._on_frame(kind, payload)


_last: dict[bytes, bytes] = {}


def _unpacked(data: bytes) -> bytes:
    """Real agents unpack a membership once each, on machines of their own."""
    found = _last.get(data)
    if found is None:
        _last.clear()
        found = _last[data] = zlib.decompress(data, GZIP)
    return found
