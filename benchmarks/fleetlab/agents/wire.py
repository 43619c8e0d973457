"""A small HTTP/1.1 client on one kept connection: cheap, so that a thousand of them do not measure themselves.

Invariants: TLS is verified against the authority that is given; one request at a time per connection; a body comes back
as it was sent, unpacked if it was packed; every failure is an OSError, after which the connection is opened anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

_HEAD_LIMIT = 1 << 16
GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address, and the name that its certificate must bear."""

    ip: str
    port: int
    name: str
    context: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int
    body: bytes
    packed: int
    """Bytes of the body on the wire."""


class Wire:
    """One connection."""

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str] | None = None) -> None:
        self.endpoint = endpoint
        lines = {"Host": f"{endpoint.name}:{endpoint.port}", "Accept-Encoding": "gzip, deflate", **(headers or {})}
        self._headers = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, method: str, target: str, body: bytes = b"", *, seconds: float, kind: str = "") -> Reply:
        """One exchange; `kind` is the content type. Raises OSError."""
        try:
            async with asyncio.timeout(seconds):
                return await self._exchange(method, target, body, kind or "application/json")
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError | asyncio.IncompleteReadError | asyncio.LimitOverrunError | EOFError):
                raise ConnectionError(f"{method} {target}: {error or type(error).__name__}") from error
            raise

    def close(self) -> None:
        """Drop the connection; the next request opens another."""
        if self._writer is not None:
            # A connection without a peer is not worth a farewell.
            with contextlib.suppress(Exception):
                self._writer.transport.abort()
        self._reader = self._writer = None

    async def _exchange(self, method: str, target: str, body: bytes, kind: str) -> Reply:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self.endpoint.ip,
                self.endpoint.port,
                ssl=self.endpoint.context,
                server_hostname=self.endpoint.name,
                limit=_HEAD_LIMIT,
            )
        head = f"{method} {target} HTTP/1.1\r\n{self._headers}"
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n" if body else "\r\n"
        self._writer.write(head.encode() + body)
        return await self._read(self._reader)

    async def _read(self, reader: asyncio.StreamReader) -> Reply:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        lines = head.lower()
        if b"\r\ntransfer-encoding: chunked" in lines:
            data = await _chunks(reader)
        else:
            start = lines.find(b"\r\ncontent-length: ")
            length = int(lines[start + 18 : lines.index(b"\r", start + 2)]) if start >= 0 else 0
            data = await reader.readexactly(length) if length else b""
        packed = len(data)
        if b"\r\ncontent-encoding: gzip" in lines:
            data = _unpacked(data)
        if b"\r\nconnection: close" in lines:
            self.close()
        return Reply(status, data, packed)


@functools.lru_cache(maxsize=4)
def _unpacked(data: bytes) -> bytes:
    """Real agents unpack a membership once each, on machines of their own."""
    return zlib.decompress(data, GZIP)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)
