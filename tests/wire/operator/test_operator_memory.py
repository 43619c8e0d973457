"""TLS connections that share one receive buffer: each still gets its own bytes."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from asyncio import sslproto
from typing import TYPE_CHECKING

from trainium_operator.coordinator.certificates import renewed
from trainium_operator.entrance.tls import ServerTls
from trainium_operator.memory import TLS_BUFFER, use_little_memory_per_connection

if TYPE_CHECKING:
    import pytest

CLIENTS = 20


async def test_connections_share_one_buffer_and_mix_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sslproto, "SSLProtocol", sslproto.SSLProtocol)  # put back afterwards
    use_little_memory_per_connection()
    tls, buffers = ServerTls(), set()
    material = renewed(None, ("localhost",), time.time())
    tls.load(material.server_cert, material.server_key)
    trust = ssl.create_default_context(cadata=material.ca_bundle.decode())

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        buffers.add(id(writer.transport._ssl_protocol.get_buffer(-1).obj))  # type: ignore[attr-defined]
        while data := await reader.read(7_000):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def talk(port: int, seed: int) -> bool:
        sent = random.Random(seed).randbytes(10 * TLS_BUFFER + seed)
        reader, writer = await asyncio.open_connection("localhost", port, ssl=trust)
        writer.write(sent)
        heard = await reader.readexactly(len(sent))
        writer.transport.abort()
        return heard == sent

    server = await asyncio.start_server(echo, "localhost", 0, ssl=tls.context)
    port = server.sockets[0].getsockname()[1]
    assert all(await asyncio.gather(*(talk(port, seed) for seed in range(CLIENTS))))
    assert len(buffers) == 1
    server.close()
    await server.wait_closed()
