"""Hostile neighbours of the coordinator, as cheap as Python makes them: bad tokens, silent connections, slow senders.

One process, which takes its options as JSON (`host`, `port`, `tokens` a second, `idle` and `slow` connections,
`sources`), attacks until its standard input ends, and tells once a second, as a JSON line, what it has done so far.
Bad tokens are sent as prepared bytes, many requests in one write, and no two are alike. Connections come from as many
addresses as `sources` says, because much of what holds a flood back goes by address.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import ssl
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PIPELINED = 256
"""Requests in one write."""
AT_ONCE = 96
"""Connections that bring tokens at one time."""
ANSWER_SECONDS = 3.0
_OPENING_AT_ONCE = 16
_SLOW_SECONDS = 0.5
_PAUSE_SECONDS = 0.5
"""After a connection that was refused or closed, before the next of its kind."""


@dataclass(slots=True)
class Done:
    """Since the beginning; connections are of now."""

    tokens: int = 0
    """Bad tokens that were sent."""
    answers: int = 0
    """Requests that were answered."""
    opened: int = 0
    """TLS connections that came about."""
    refused: int = 0
    """Connections that were closed before TLS was there."""
    idle: int = 0
    slow: int = 0
    cpu: float = 0.0


class Attack:
    """All attackers."""

    def __init__(self, options: dict[str, object]) -> None:
        self._host, self._port = str(options["host"]), int(str(options["port"]))
        self._rate = float(str(options["tokens"]))
        self._idle, self._slow = int(str(options["idle"])), int(str(options["slow"]))
        self._sources = int(str(options["sources"]))
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE
        self._opening = asyncio.Semaphore(_OPENING_AT_ONCE)
        self._numbers = itertools.count(random.randrange(1 << 40) << 20)
        self._began = time.monotonic()
        self.done = Done()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE if self._rate else 0):
                group.create_task(self._again(self._bring_tokens))
            for _ in range(self._idle):
                group.create_task(self._again(self._say_nothing))
            for _ in range(self._slow):
                group.create_task(self._again(self._say_slowly))

    async def _again(self, what: Callable[[], Awaitable[None]]) -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                await what()
            await asyncio.sleep(_PAUSE_SECONDS * random.uniform(0.5, 1.5))

    async def _open(self, *, waits: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        source = random.randrange(self._sources)
        async with self._opening if waits else contextlib.nullcontext():
            try:
                found = await asyncio.open_connection(
                    self._host,
                    self._port,
                    ssl=self._context,
                    server_hostname="x",
                    local_addr=(f"127.1.{source >> 8}.{source & 255}", 0),
                )
            except OSError:
                self.done.refused += 1
                raise
        self.done.opened += 1
        return found

    async def _bring_tokens(self) -> None:
        while self.done.tokens > self._rate * (time.monotonic() - self._began):  # noqa: ASYNC110 - to keep a rate
            await asyncio.sleep(0.01)
        reader, writer = await self._open(waits=False)
        try:
            numbers = itertools.islice(self._numbers, PIPELINED)
            writer.write(
                b"".join(
                    b"POST /v1/heartbeat HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer bad-%d\r\n\r\n" % number
                    for number in numbers
                )
            )
            self.done.tokens += PIPELINED
            async with asyncio.timeout(ANSWER_SECONDS):
                while data := await reader.read(1 << 16):
                    self.done.answers += data.count(b"HTTP/1.1 ")
        finally:
            writer.transport.abort()

    async def _say_nothing(self) -> None:
        reader, writer = await self._open()
        self.done.idle += 1
        try:
            await reader.read(1)
        finally:
            self.done.idle -= 1
            writer.transport.abort()

    async def _say_slowly(self) -> None:
        reader, writer = await self._open()
        self.done.slow += 1
        try:
            writer.write(b"POST /v1/heartbeat HTTP/1.1\r\nHost: x\r\nContent-Length: 700000\r\nX-Slow: ")
            ended = asyncio.create_task(reader.read(1 << 10))
            while not ended.done():
                writer.write(b"x")
                await asyncio.wait({ended}, timeout=_SLOW_SECONDS)
            ended.result()
        finally:
            self.done.slow -= 1
            writer.transport.abort()


async def _serve(options: dict[str, object]) -> None:
    attack = Attack(options)
    attacking = asyncio.create_task(attack.run())
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not ended.done():
        await asyncio.wait({ended, attacking}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        if attacking.done():
            attacking.result()
        attack.done.cpu = time.process_time()
        print(json.dumps({"at": time.monotonic(), **asdict(attack.done)}), flush=True)
    attacking.cancel()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
