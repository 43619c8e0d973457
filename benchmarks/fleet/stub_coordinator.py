"""Serve agents as the floor of the coordinator: the same streams over the same TLS, without any work.

The server runs in a separate process, as the operator does. It takes its options as JSON (`host`, `port`,
`certificate`, `key`: paths), prints `ready` when it listens, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from benchmarks.fleet.operator_process import ROOT, SERVER_NAME, free_port
from trainium_contract.wire.messages import HeartbeatResponse, RegisterResponse
from trainium_contract.wire.stream import UPGRADE, FrameKind, FrameReader, encode_frame
from trainium_operator.coordinator.certificates import renew_material
from trainium_operator.memory import freeze_gc, use_little_memory_per_connection

_START_SECONDS = 30.0
_HOST = "127.0.0.3"
_MAX_FRAME_BYTES = 1 << 20
_UPGRADED = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n".encode()
_REGISTERED = encode_frame(
    FrameKind.REGISTERED, RegisterResponse(heartbeat_seconds=1.0, time=1.0).model_dump_json(by_alias=True).encode()
)
_ACKNOWLEDGED = encode_frame(
    FrameKind.HEARTBEAT_ACK,
    HeartbeatResponse(generation=0, full_heartbeat_seconds=0.0, time=1.0).model_dump_json(by_alias=True).encode(),
)


class StubCoordinator:
    """Controls the process of the server, which runs within the `async with` block."""

    def __init__(self) -> None:
        self.host, self.port = _HOST, free_port(_HOST)
        material = renew_material(None, (SERVER_NAME,), time.time())
        self.authority = material.ca_bundle.decode()
        self._folder = tempfile.TemporaryDirectory(prefix="trainium-bench-")
        self._certificate, self._key = Path(self._folder.name, "tls.crt"), Path(self._folder.name, "tls.key")
        self._certificate.write_bytes(material.server_cert)
        self._key.touch(mode=0o600)
        self._key.write_bytes(material.server_key)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        paths = {"certificate": str(self._certificate), "key": str(self._key)}
        options = {"host": self.host, "port": self.port, **paths}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.fleet.stub_coordinator",
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            line = await self._process.stdout.readline()
        if line.strip() != b"ready":
            raise RuntimeError("the stub coordinator did not start")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        self._folder.cleanup()


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._head = b""
        self._upgraded = False
        self._reader = FrameReader(_MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implement asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Implement asyncio.Protocol."""
        assert self._transport is not None
        if not self._upgraded:
            self._head, end, data = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                return
            self._upgraded = True
            self._transport.write(_UPGRADED)
        for kind, _ in self._reader.frames(data):
            if kind == FrameKind.REGISTER:
                self._transport.write(_REGISTERED)
            elif kind == FrameKind.HEARTBEAT:
                self._transport.write(_ACKNOWLEDGED)


async def _serve(options: dict[str, str]) -> None:
    use_little_memory_per_connection()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options["certificate"], options["key"])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Connection, options["host"], int(options["port"]), ssl=context, backlog=1024)
    freeze_gc()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
