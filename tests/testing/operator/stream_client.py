"""An agent's stream, frame by frame: what a test sends over it, and the responses of the coordinator."""

import asyncio
import gzip
import json
import ssl
from typing import Any, Self

from tests.testing.api.token_issuer import ISSUER
from tests.testing.suite.timeouts import scaled
from trainium_contract.wire.stream import STREAM_PATH, UPGRADE, FrameKind, FrameReader, encode_frame

_RESPONSES = (FrameKind.REGISTERED, FrameKind.HEARTBEAT_ACK, FrameKind.ERROR)
SWITCHING = 101


class StreamClient:
    """One connection with the `status` of its upgrade response, or the body of a `refusal`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.status = 0
        self.refusal: Any = None
        self.registered = False
        self._frames = FrameReader(1 << 24)
        self._received: list[tuple[int, bytes]] = []

    @classmethod
    async def open(
        cls,
        port: int,
        pod: str = "w-0",
        *,
        trust: ssl.SSLContext | None = None,
        token: str | None = None,
        after: int = 0,
        source: str = "127.0.0.1",
        **headers: str,
    ) -> Self:
        """Connect to loopback and ask for a stream."""
        name = "localhost" if trust is not None else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trust, server_hostname=name, local_addr=(source, 0)
        )
        client = cls(reader, writer)
        fields = {
            "Host": "x",
            "Connection": "Upgrade",
            "Upgrade": UPGRADE,
            "Authorization": f"Bearer {token or ISSUER.token(pod)}",
        } | headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"GET {STREAM_PATH}?podUid=uid-{pod}&after={after} HTTP/1.1\r\n{lines}\r\n".encode())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            client.status = int(head[9:12])
            if client.status != SWITCHING:
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                client.refusal = json.loads(await reader.readexactly(length))
        except BaseException:
            client.close()
            raise
        return client

    def send(self, kind: int, body: Any = None) -> None:
        payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        self.writer.write(encode_frame(kind, payload))  # type: ignore[arg-type]

    async def next(self) -> tuple[int, Any]:
        """Return kind and content of the next frame; (0, None) at the end."""
        async with asyncio.timeout(scaled(20)):
            while not self._received:
                data = await self.reader.read(1 << 16)
                if not data:
                    return 0, None
                self._received += self._frames.split_frames(data)
        kind, payload = self._received.pop(0)
        if kind == FrameKind.PACKED_MEMBERSHIP:
            payload = gzip.decompress(payload)
        return kind, json.loads(payload)

    async def exchange(self, kind: FrameKind, body: Any) -> tuple[int, Any]:
        """Send a frame and return the status and content of its response; skip memberships that arrive before it."""
        if self.status != SWITCHING:
            return self.status, self.refusal
        self.send(kind, body)
        while True:
            response, content = await self.next()
            if response in _RESPONSES or not response:
                break
        self.registered = self.registered or response == FrameKind.REGISTERED
        return (content["status"] if response == FrameKind.ERROR else 200 if response else 0), content

    async def last_refusal(self) -> tuple[int, str]:
        """Return status and message of the error with which the coordinator closes the stream."""
        kind, content = await self.next()
        assert kind == FrameKind.ERROR
        assert await self.next() == (0, None)
        return content["status"], content["error"]

    def close(self) -> None:
        self.writer.transport.abort()
