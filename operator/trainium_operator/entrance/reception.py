"""A server behind a `Door`: who holds its connections, how strangers are slowed down, and how it stops.

Invariants: every request passes the middleware, so every connection's own time is counted; a stranger who is refused
again and again waits for it, can send nothing meanwhile, and has to come anew.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from trainium_operator.entrance.door import BROKEN, Door, Visit
from trainium_operator.entrance.errors import FloodedError, RefusedError, ReviewUnavailableError, UnauthenticatedError
from trainium_operator.entrance.guests import Guests

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterable

    from trainium_operator.entrance.guests import Guest

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

FREE_REFUSALS = 3
"""Over one connection of a stranger; the next come late, and reach no log."""
FLOOD_SECONDS = 1.0
SHUTDOWN_SECONDS = 2.0
RETRY_AFTER = {"Retry-After": "1"}
_STRANGERS_FAULT = frozenset({400, 401, 403, 404, 405, 408, 413, 429})


class Upgrade(web.StreamResponse):
    """101, and then the connection is another protocol's: `take(left)` makes it, `left` is to be called at its end."""

    def __init__(self, name: str, take: Callable[[Callable[[], None]], asyncio.Protocol]) -> None:
        super().__init__(status=101)
        self._name = name
        self._take = take

    async def prepare(self, request: web.BaseRequest) -> None:
        """See StreamResponse: instead of a head of HTTP's own, the last one."""
        visit, transport = request.protocol, request.transport
        if not isinstance(visit, Visit) or transport is None:
            raise ConnectionResetError
        head = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {self._name}\r\n\r\n"
        transport.write(head.encode())
        visit.hand_over(self._take(visit.leaver()))

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing ends here."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What somebody who is not let in is told."""

    status: int
    sentence: str
    headers: dict[str, str] = field(default_factory=dict)


def refusal_of(error: Exception) -> Refusal | None:
    """None for a defect of ours."""
    match error:
        case UnauthenticatedError():
            return Refusal(401, str(error), {"WWW-Authenticate": "Bearer"})
        case FloodedError():
            return Refusal(429, f"{error}; try again in a minute", {"Retry-After": "60"})
        case RefusedError():
            return Refusal(403, str(error))
        case ReviewUnavailableError():
            return Refusal(503, "the API server cannot check the token now; try again", RETRY_AFTER)
        case web.HTTPException():
            return Refusal(error.status, error.reason)
        case _:
            return Refusal(400, "the request did not come to its end") if isinstance(error, BROKEN) else None


class Reception:
    """`open`, then `close`."""

    def __init__(
        self,
        answer: Callable[[web.Request, Handler], Awaitable[web.StreamResponse]],
        *,
        on_answer: Callable[[str, int], None] = lambda _path, _status: None,
        most_strangers: int | None = None,
        most_in_vain: int | None = None,
    ) -> None:
        """`answer(request, handler)` calls the handler and makes an answer of its errors; the bounds: see Guests."""
        self.guests = Guests(most_strangers, most_in_vain=most_in_vain)
        self._answer = answer
        self._on_answer = on_answer
        self._door = Door(self.guests)
        self._runner: web.AppRunner | None = None

    async def open(self, routes: Iterable[web.RouteDef], host: str, port: int, context: ssl.SSLContext | None) -> int:
        """Listen; returns the port, which matters when 0 was asked for. Raises OSError."""
        application = web.Application(client_max_size=1024, middlewares=[self._receive])
        application.router.add_routes(routes)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        await self._runner.setup()
        assert self._runner.server is not None
        return self._door.open(self._runner.server, host, port, context)

    async def close(self) -> None:
        """Let nobody in any more, and close."""
        await self._door.shut()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def connections(self) -> int:
        """How many are open."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    def proved(self, request: web.Request, holder: str) -> None:
        """The request brought a valid token of this holder: its connection is no stranger's any more."""
        if isinstance(request.protocol, Visit):
            self.guests.proved(request.protocol.guest, holder)

    @staticmethod
    def is_new_to_refusals(request: web.Request) -> bool:
        """Whether a refusal of this request is worth a line of the log."""
        return not isinstance(request.protocol, Visit) or request.protocol.guest.refusals < FREE_REFUSALS

    @web.middleware
    async def _receive(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        guest = request.protocol.guest if isinstance(request.protocol, Visit) else None
        if guest is not None:
            self.guests.asked(guest)
        response = await self._answer(request, handler)
        if guest is not None:
            if response.status in _STRANGERS_FAULT and not guest.holder:
                await _slow_down(guest, response)
            self.guests.answered(guest)
        self._on_answer(request.path, response.status)
        return response


async def _slow_down(guest: Guest, response: web.StreamResponse) -> None:
    guest.refusals += 1
    if guest.refusals > FREE_REFUSALS:
        await asyncio.sleep(FLOOD_SECONDS)
        response.force_close()
