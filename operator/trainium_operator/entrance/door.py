"""A listening socket: connections are counted before the first byte of TLS is read.

Invariants: in one turn of the loop `IN_A_TURN` connections are accepted and as many handshakes begun, however many want
to come, so who is in waits for no more; a handshake takes `HANDSHAKE_SECONDS` at most, and as long may pass before its
first byte; request lines, headers and their number are bounded while they are read; nothing that comes is unpacked;
errors of strangers reach no log.
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

    from trainium_operator.entrance.guests import Guest, Guests

HANDSHAKE_SECONDS = 10.0
BACKLOG = 1024
IN_A_TURN = 16
"""Handshakes take about 0.5 ms each; and where turns are long, as while a plan is made, more than one must get on."""
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

    def hand_over(self, protocol: Protocol) -> None:
        """From now on the connection, and the guest who holds it, are this protocol's; it must say when they leave."""
        transport = self.transport
        if transport is None:
            raise ConnectionResetError
        self.transport = None
        self.force_close()  # the loop over requests ends; nothing is closed, since there is nothing here any more
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        asyncio.get_running_loop().call_soon(super().connection_lost, None)

    def leaver(self) -> Callable[[], None]:
        """To be called when the connection that was handed over is closed; keeps nothing of HTTP alive."""
        return partial(self._guests.left, self.guest)

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
        self._turns = asyncio.Semaphore(IN_A_TURN)
        """Of those whose handshake may begin: most of its work is the answer to its first bytes."""

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
        for number in count(1):
            await self._guests.room()
            if number % IN_A_TURN == 0:
                await asyncio.sleep(0)  # what is there already is accepted without a pause otherwise
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
            if context is not None:
                await _first_byte(connection)
                async with self._turns:
                    await asyncio.sleep(0)
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Visit(server, self._guests, guest),
                connection,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if context is not None else None,
            )
        except (OSError, TimeoutError):
            self._guests.left(guest)
            connection.close()
        except asyncio.CancelledError:
            self._guests.left(guest)
            connection.close()
            raise
        else:
            guest.close = transport.abort


async def _first_byte(connection: socket.socket) -> None:
    """Wait until something has come. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    come: asyncio.Future[None] = loop.create_future()
    descriptor = connection.fileno()
    loop.add_reader(descriptor, _set, come)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await come
    finally:
        loop.remove_reader(descriptor)


def _set(come: asyncio.Future[None]) -> None:
    if not come.done():
        come.set_result(None)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
