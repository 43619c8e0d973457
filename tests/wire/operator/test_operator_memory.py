"""What the operator holds in memory: one receive buffer for all connections, and of libraries what it uses."""

from __future__ import annotations

import asyncio
import random
import ssl
import subprocess
import sys
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


OF_THE_LIBRARY = """
import asyncio, sys
from trainium_operator.cluster.api.transport import NoClusterError, connect

async def scenario():
    try:
        await connect("/nowhere/kubeconfig")
    except NoClusterError:
        return
    raise AssertionError("a file that does not exist")

asyncio.run(scenario())
import trainium_operator.handlers
unused = ("kubernetes.client.api", "kubernetes.dynamic", "kubernetes.stream", "kubernetes.aio.dynamic")
print([name for name in unused if name in sys.modules], len([name for name in sys.modules if "kubernetes" in name]))
"""


def test_of_the_client_library_only_what_is_used_is_imported() -> None:
    """All of it are 315 modules, and 9 MiB."""
    done = subprocess.run([sys.executable, "-c", OF_THE_LIBRARY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    unused, count = done.stdout.rsplit(maxsplit=1)
    assert unused == "[]"
    assert int(count) < 40


def test_who_has_imported_the_whole_client_library_keeps_it() -> None:
    program = (
        "import kubernetes\n"
        "from trainium_operator.cluster.api.client_library import import_only_parts\n"
        "import_only_parts()\n"
        "from kubernetes.aio.client.configuration import Configuration\n"
        "assert kubernetes.client.CoreV1Api and kubernetes.aio.client.Configuration is Configuration\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
