"""A listening socket that counts connections before it reads the first byte of TLS.

Guarantees:
- In one iteration of the event loop `ACCEPTED_AT_ONCE` connections are accepted and as many handshakes start, so a
  flood does not delay open connections.
- A handshake takes `HANDSHAKE_SECONDS` at most, and its first byte arrives within the same time.
- Request lines, headers and their number are bounded while they are read. Compressed bodies are never unpacked.
- Errors that anonymous clients cause reach no log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

if TYPE_CHECKING:
    import ssl
    from asyncio import Protocol
    from collections.abc import Callable, Coroutine

    from trainium_operator.http.limiter import ClientConnection, ConnectionLimiter

HANDSHAKE_SECONDS = 10.0
BACKLOG = 1024
ACCEPTED_AT_ONCE = 16
"""A handshake takes about 0.5 ms. During long iterations, as for a plan, more than one must proceed."""
NO_FILE_SECONDS = 0.1
"""Pause when no connection can be accepted, as when no file descriptor is left."""
_LIMITS: dict[str, Any] = {
    "access_log": None,
    "keepalive_timeout": 75.0,
    "max_line_size": 2_048,
    "max_headers": 64,
    "max_field_size": 8_190,
    "lingering_time": 2.0,
    "auto_decompress": False,
}


BROKEN = (ConnectionError, ClientError, HttpProcessingError, web.RequestPayloadError)
"""Errors of a connection that breaks or sends no request."""


class _TracebackFilter(logging.Filter):
    """Drops the traceback of a broken connection from aiohttp's log lines, because any worker can break one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Reduce the record to one line; no record is dropped."""
        if record.exc_info and isinstance(record.exc_info[1], BROKEN):
            record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
        return True


_log = logging.getLogger(f"{__name__}.http")
_log.addFilter(_TracebackFilter())


class TrackedConnection(web.RequestHandler):
    """aiohttp's connection, which reports its end to the limiter."""

    __slots__ = ("_limiter", "client")

    def __init__(self, server: web.Server, limiter: ConnectionLimiter, client: ClientConnection) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), logger=_log, **_LIMITS)
        self.client = client
        self._limiter = limiter

    def switch_protocol(self, protocol: Protocol) -> None:
        """Pass the connection to this protocol, which must call `build_close_callback` at its end."""
        transport = self.transport
        if transport is None:
            raise ConnectionResetError
        self.transport = None
        self.force_close()  # ends the loop over requests; without a transport nothing is closed
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        asyncio.get_running_loop().call_soon(super().connection_lost, None)

    def build_close_callback(self) -> Callable[[], None]:
        """Return the callback for the end of a switched connection; it keeps no HTTP state alive."""
        return partial(self._limiter.release, self.client)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._limiter.release(self.client)
        super().connection_lost(exc)


class LimitedListener:
    """Accepts connections between `open` and `close`."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self._limiter = limiter
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes = asyncio.Semaphore(ACCEPTED_AT_ONCE)
        """Limits handshakes that start: most of the work is the response to the first bytes."""

    def open(self, server: web.Server, host: str, port: int, context: ssl.SSLContext | None) -> int:
        """Listen; return the port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._spawn(self._accept(self._listener, server, context))
        bound: int = self._listener.getsockname()[1]
        return bound

    async def close(self) -> None:
        """Accept no more connections; open ones stay open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket, server: web.Server, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        for number in count(1):
            await self._limiter.wait_for_capacity()
            if number % ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)  # otherwise waiting connections are accepted without a pause
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(NO_FILE_SECONDS)
                continue
            client = self._limiter.track(address[0], connection.close)
            if client is None:
                connection.close()
                continue
            handshake = self._spawn(self._start_handshake(connection, client, server, context))
            client.close = handshake.cancel

    async def _start_handshake(
        self, connection: socket.socket, client: ClientConnection, server: web.Server, context: ssl.SSLContext | None
    ) -> None:
        try:
            if context is not None:
                await _wait_for_first_byte(connection)
                async with self._handshakes:
                    await asyncio.sleep(0)
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: TrackedConnection(server, self._limiter, client),
                connection,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if context is not None else None,
            )
        except (OSError, TimeoutError):
            self._limiter.release(client)
            connection.close()
        except asyncio.CancelledError:
            self._limiter.release(client)
            connection.close()
            raise
        else:
            client.close = transport.abort


async def _wait_for_first_byte(connection: socket.socket) -> None:
    """Wait until a byte can be read. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    descriptor = connection.fileno()
    loop.add_reader(descriptor, _set, readable)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await readable
    finally:
        loop.remove_reader(descriptor)


def _set(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
