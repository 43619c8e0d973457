"""The memory of the operator: one receive buffer for all connections, and only the libraries that it uses."""

import asyncio
import gc
import random
import ssl
import subprocess
import sys
import time
import weakref
from asyncio import sslproto

import pytest

from tests.testing.suite.timeouts import async_until
from trainium_operator import memory
from trainium_operator.coordinator.certificates import renew_material
from trainium_operator.http.tls import ServerTls
from trainium_operator.memory import TLS_BUFFER, use_little_memory_per_connection

CLIENTS = 20


async def test_tls_connections_share_one_receive_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sslproto, "SSLProtocol", sslproto.SSLProtocol)  # put back afterwards
    use_little_memory_per_connection()
    tls, buffers, attributes = ServerTls(), set(), 0
    material = renew_material(None, ("localhost",), time.time())
    tls.load(material.server_cert, material.server_key)
    trust = ssl.create_default_context(cadata=material.ca_bundle.decode())

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attributes
        protocol = writer.transport._ssl_protocol  # type: ignore[attr-defined]
        buffers.add(id(protocol.get_buffer(-1).obj))
        attributes = max(attributes, len(vars(protocol)))
        while data := await reader.read(7_000):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def exchange(port: int, seed: int) -> bool:
        sent = random.Random(seed).randbytes(10 * TLS_BUFFER + seed)
        reader, writer = await asyncio.open_connection("localhost", port, ssl=trust)
        writer.write(sent)
        received = await reader.readexactly(len(sent))
        writer.transport.abort()
        return received == sent

    server = await asyncio.start_server(echo, "localhost", 0, ssl=tls.context)
    port = server.sockets[0].getsockname()[1]
    assert all(await asyncio.gather(*(exchange(port, seed) for seed in range(CLIENTS))))
    assert len(buffers) == 1
    assert attributes <= 29, "with more names in its dictionary each connection has a table of its own for them"
    server.close()
    await server.wait_closed()


async def test_garbage_is_collected_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.tied = self

    collected = asyncio.Event()
    weakref.finalize(Cycle(), collected.set)
    monkeypatch.setattr(memory, "TRIM_SECONDS", 0.01)
    gc.disable()
    try:
        tidying = asyncio.create_task(memory.trim_periodically())
        await async_until(collected.is_set, "an unreferenced cycle of objects is collected")
        assert not tidying.done()
        tidying.cancel()
    finally:
        gc.enable()


LARGE = """
import re
from pathlib import Path
from trainium_operator.memory import trim_heap, use_one_heap

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024

use_one_heap()
bytearray(8_000_000)  # freed at once: the C library would by default take the next large ones from its heap
before, kept = resident(), []
for _ in range(20):
    large = [bytearray(3_000_000) for _ in range(2)]
    kept.append(bytearray(20_000))  # what stays behind them
    large.clear()
print(resident() - before)
blocks = [bytearray(100_000) for _ in range(400)]
kept.append(bytearray(20_000))
blocks.clear()
trim_heap()
print(resident() - before)
"""


def test_freed_large_blocks_are_returned_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    large, small = map(int, done.stdout.split())
    assert large < 3, "MiB of blocks of 3 MB, each freed before the next"
    assert small < 10, "MiB of 40 MB in blocks of 100 kB, freed behind others"
