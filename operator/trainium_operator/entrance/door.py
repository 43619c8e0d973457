"""A listening socket: connections are counted before the first byte of TLS is read.

Invariants: a handshake takes `HANDSHAKE_SECONDS` at most; request lines, headers and their number are bounded while
they are read; nothing that comes is unpacked; errors of strangers reach no log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Coroutine

    from trainium_operator.entrance.guests import Guest, Guests

HANDSHAKE_SECONDS = 10.0
BACKLOG = 1024
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
"""What a connection that breaks, or brings no request, raises."""


class _OneLine(logging.Filter):
    """What aiohttp has to say of a connection that broke, without its traceback: any worker can break one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Make it a line; nothing is left out."""
        if record.exc_info and isinstance(record.exc_info[1], BROKEN):
            record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
        return True


_log = logging.getLogger(f"{__name__}.http")
_log.addFilter(_OneLine())


class Visit(web.RequestHandler):
    """aiohttp's connection, which says when it is over."""

    __slots__ = ("_guests", "guest")

    def __init__(self, server: web.Server, guests: Guests, guest: Guest) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), logger=_log, **_LIMITS)
        self.guest = guest
        self._guests = guests

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._guests.left(self.guest)
        super().connection_lost(exc)


class Door:
    """`open`, then `shut`."""

    def __init__(self, guests: Guests) -> None:
        self._guests = guests
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, server: web.Server, host: str, port: int, context: ssl.SSLContext | None) -> int:
        """Listen; returns the port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._spawn(self._accept(self._listener, server, context))
        bound: int = self._listener.getsockname()[1]
        return bound

    async def shut(self) -> None:
        """Accept nothing more; connections that are open stay so."""
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
        while True:
            await self._guests.room()
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(NO_FILE_SECONDS)
                continue
            guest = self._guests.came(address[0], connection.close)
            if guest is None:
                connection.close()
                continue
            greeting = self._spawn(self._greet(connection, guest, server, context))
            guest.close = partial(_cancel, greeting)

    async def _greet(
        self, connection: socket.socket, guest: Guest, server: web.Server, context: ssl.SSLContext | None
    ) -> None:
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Visit(server, self._guests, guest),
                connection,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if context is not None else None,
            )
        except OSError:
            self._guests.left(guest)
            connection.close()
        except asyncio.CancelledError:
            self._guests.left(guest)
            connection.close()
            raise
        else:
            guest.close = transport.abort


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
