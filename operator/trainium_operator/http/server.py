"""An HTTP server behind a `LimitedListener`: it assigns connections to holders.

Guarantees:
- Every request passes the middleware, so the limiter counts the time of every connection.
- An anonymous client that is refused has to connect again, which the limiter counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from trainium_operator.http.errors import RefusedError
from trainium_operator.http.limiter import ConnectionLimiter
from trainium_operator.http.listener import BROKEN, LimitedListener, TrackedConnection

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SHUTDOWN_SECONDS = 2.0
RETRY_AFTER = {"Retry-After": "1"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "60"}, 503: RETRY_AFTER}
_CLIENT_ERRORS = frozenset({400, 401, 403, 404, 405, 408, 413, 429})


class Upgrade(web.StreamResponse):
    """Answer 101 and switch to the protocol that `take(closed)` returns, which calls `closed` at its end."""

    def __init__(self, name: str, take: Callable[[Callable[[], None]], asyncio.Protocol]) -> None:
        super().__init__(status=101)
        self._name = name
        self._take = take

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write the HTTP response head and switch protocols; see StreamResponse."""
        connection, transport = request.protocol, request.transport
        if not isinstance(connection, TrackedConnection) or transport is None:
            raise ConnectionResetError
        head = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {self._name}\r\n\r\n"
        transport.write(head.encode())
        connection.switch_protocol(self._take(connection.build_close_callback()))

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: the connection stays open."""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """The response to a client that is refused."""

    status: int
    sentence: str
    headers: Mapping[str, str] = field(default_factory=dict)


def build_error_response(error: Exception) -> ErrorResponse | None:
    """Return the response to a client's error; None for a defect of the operator."""
    match error:
        case RefusedError():
            return ErrorResponse(error.status, str(error), _HEADERS.get(error.status, {}))
        case web.HTTPException():
            return ErrorResponse(error.status, error.reason)
        case _:
            return ErrorResponse(400, "the request did not come to its end") if isinstance(error, BROKEN) else None


class HttpServer:
    """Serves requests between `open` and `close`."""

    def __init__(
        self,
        answer: Callable[[web.Request, Handler], Awaitable[web.StreamResponse]],
        *,
        on_answer: Callable[[str, int], None] = lambda _path, _status: None,
        max_anonymous: int | None = None,
        max_failed: int | None = None,
    ) -> None:
        """`answer(request, handler)` calls the handler and converts its errors into responses."""
        self.limiter = ConnectionLimiter(max_anonymous, max_failed=max_failed)
        self._answer = answer
        self._on_answer = on_answer
        self._listener = LimitedListener(self.limiter)
        self._runner: web.AppRunner | None = None

    async def open(self, routes: Iterable[web.RouteDef], host: str, port: int, context: ssl.SSLContext | None) -> int:
        """Listen and return the port, which matters for port 0. Raises OSError."""
        application = web.Application(client_max_size=1024, middlewares=[self._receive])
        application.router.add_routes(routes)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        await self._runner.setup()
        assert self._runner.server is not None
        return self._listener.open(self._runner.server, host, port, context)

    async def close(self) -> None:
        """Accept no more connections, and close all."""
        await self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    def assign_connection(self, request: web.Request, holder: str) -> None:
        """Assign the request's connection to the holder of the valid token that it carries."""
        if isinstance(request.protocol, TrackedConnection):
            self.limiter.assign_holder(request.protocol.client, holder)

    @web.middleware
    async def _receive(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        client = request.protocol.client if isinstance(request.protocol, TrackedConnection) else None
        if client is not None:
            self.limiter.request_started(client)
        response = await self._answer(request, handler)
        if client is not None:
            if response.status in _CLIENT_ERRORS and not client.holder:
                response.force_close()
            self.limiter.request_finished(client)
        self._on_answer(request.path, response.status)
        return response
