"""A connection without a network: data goes directly to the protocol of the server, and its responses are kept."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.testing.fuzz.invariants import require
from trainium_contract.wire.stream import HEAD_BYTES, FrameKind, parse_frame_header

LONGEST_SENTENCE = 1024
_HEAD = re.compile(rb"HTTP/1\.[01] (\d\d\d)")
_STATUSES = frozenset({100, 101, 200, 204, 400, 401, 403, 404, 405, 408, 409, 413, 417, 426, 429, 501, 503, 505})
UPGRADED = b"HTTP/1.1 101 "


class Transport(asyncio.Transport):
    """Keep in `written` what the server writes; a `stalled` client reads nothing."""

    def __init__(self, source: str, *, stalled: bool = False) -> None:
        super().__init__({"peername": (source, 40_000), "sockname": ("10.0.0.100", 8443)})
        self.written = bytearray()
        self.closed = False
        self._stalled = stalled
        self._paused = False
        self._unread = b""
        self._protocol: asyncio.BaseProtocol | None = None
        self._loop = asyncio.get_running_loop()

    def open(self, protocol: asyncio.Protocol) -> None:
        """Connect the protocol of the server."""
        self._protocol = protocol
        protocol.connection_made(self)

    def receive(self, data: bytes) -> None:
        """Deliver data of the client; buffer it while reading is paused."""
        self._unread += data
        if self._unread and not self._paused and not self.closed and isinstance(self._protocol, asyncio.Protocol):
            self._unread, data = b"", self._unread
            self._protocol.data_received(data)

    def hang_up(self) -> None:
        """Close the end of the client."""
        if not self.closed and isinstance(self._protocol, asyncio.Protocol):
            self._protocol.eof_received()
        self.close()

    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        """See asyncio.WriteTransport."""
        self.written += data

    def get_write_buffer_size(self) -> int:
        """See asyncio.WriteTransport."""
        return len(self.written) if self._stalled else 0

    def close(self) -> None:
        """See asyncio.BaseTransport."""
        if not self.closed:
            self.closed = True
            self._loop.call_soon(self._close_protocol)

    def _close_protocol(self) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(None)

    def abort(self) -> None:
        """See asyncio.WriteTransport."""
        self.close()

    def is_closing(self) -> bool:
        """See asyncio.BaseTransport."""
        return self.closed

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """See asyncio.BaseTransport."""
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """See asyncio.BaseTransport."""
        assert self._protocol is not None
        return self._protocol

    def is_reading(self) -> bool:
        """See asyncio.ReadTransport."""
        return not self.closed and not self._paused

    def pause_reading(self) -> None:
        """See asyncio.ReadTransport."""
        self._paused = True

    def resume_reading(self) -> None:
        """See asyncio.ReadTransport."""
        self._paused = False
        self._loop.call_soon(self.receive, b"")


@dataclass
class ClientConnection:
    """The client end of one connection."""

    transport: Transport
    sent: int = 0
    requests: int = 0
    statuses: list[int] = field(default_factory=list)

    def send(self, data: bytes, pieces: int) -> None:
        """Send data in this number of pieces."""
        self.sent += len(data)
        size = max(1, -(-len(data) // max(1, pieces)))
        for start in range(0, len(data), size):
            self.transport.receive(data[start : start + size])

    def check(self, allowed: Callable[[int], int]) -> None:
        """Check that every response belongs to the protocol, and that all have at most `allowed(sent)` bytes."""
        written = bytes(self.transport.written)
        require(len(written) <= allowed(self.sent), f"{len(written)} bytes for {self.sent}")
        plain, upgrade, frames = written.partition(UPGRADED)
        for status in _HEAD.findall(plain):
            require(int(status) in _STATUSES, f"status {status.decode()}")
        if upgrade:
            _check_frames(frames.partition(b"\r\n\r\n")[2])


def _check_frames(data: bytes) -> None:
    start = 0
    while start < len(data):
        kind, length = parse_frame_header(data[start : start + HEAD_BYTES])
        payload = data[start + HEAD_BYTES : start + HEAD_BYTES + length]
        require(len(payload) == length, "a frame that is cut short")
        start += HEAD_BYTES + length
        if kind == FrameKind.ERROR:
            refusal = json.loads(payload)
            require(refusal["status"] != 500, "a defect in the coordinator")
            require(len(refusal["error"]) <= LONGEST_SENTENCE, f"a sentence of {len(refusal['error'])} characters")
