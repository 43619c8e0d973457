"""Connections that break at any point: a worker can make as many as it likes, so none is an error with a traceback."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from typing import TYPE_CHECKING

import pytest

from trainium_operator.coordinator.authentication import Caller
from trainium_operator.coordinator.server import CoordinatorServer
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.plan.model.names import JobId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HEAD = b"GET /v1/stream?podUid=uid-w-0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
STREAM = HEAD + b"Connection: Upgrade\r\nUpgrade: trainium-agent\r\n\r\n"
BROKEN = {
    "before a word": b"",
    "in the head": HEAD[:40],
    "in the body": HEAD + b'Content-Length: 400\r\n\r\n{"protocol": 2',
    "in a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n40\r\n{",
    "with a chunk that has no length": HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}",
    "with words that are no request": b"\x16\x03\x01\x02\x00 hello\r\n\r\n",
    "after the request for a stream": STREAM,
    "in the head of a frame": STREAM + b"\x01\x00",
    "in a frame": STREAM + b"\x01\x00\x00\x01\x00{",
}


class Listener:
    """Lets everybody in."""

    async def identify(self, authorization: str, source: str = "") -> Caller:
        return Caller("team", "w-0", "uid-w-0")

    def check(self, caller: Caller, **_: str | None) -> JobId:
        return JobId("team", "llama", "job-uid")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = CoordinatorServer(
        CoordinatorState(time.time),
        Listener(),  # type: ignore[arg-type]
        is_serving=lambda: True,
        notify=lambda *_: None,
    )
    yield await server.start("127.0.0.1", 0, None)
    await server.stop()


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
@pytest.mark.parametrize("where", BROKEN)
async def test_a_connection_that_breaks_is_no_error_and_no_traceback(
    port: int, where: str, reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(BROKEN[where])
            await writer.drain()
            await asyncio.sleep(0.05)  # let it be read
            if reset:
                stream: socket.socket = writer.get_extra_info("socket")
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
            del reader
        await asyncio.sleep(0.2)
    loud = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert not loud, [record.getMessage() for record in loud]
