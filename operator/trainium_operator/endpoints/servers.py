"""The servers for people and monitoring: probes over HTTP; metrics and pages of jobs over HTTPS.

Guarantees:
- Every replica answers, whether or not it leads. A request's body is never read.
- Over HTTPS the API server authorizes every request; a connection is anonymous until its user was allowed an action.
- Live means that the event loop runs and that each watch received something lately (bookmarks count), unless the API
  server itself is unavailable, because a restart would not help. Ready means that the caches are in sync.
- The text of the metrics is created at most once a second, however many clients request it.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from trainium_operator.endpoints.access import Access, PathAttributes, ResourceAttributes
from trainium_operator.endpoints.pages import Jobs, Pages
from trainium_operator.http.server import HttpServer, build_error_response

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from trainium_operator.http.server import Handler

logger = logging.getLogger(__name__)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRESH_SECONDS = 1.0
MAX_CONNECTIONS = 256
MAX_ANONYMOUS = 256
METRICS = PathAttributes("/metrics")


async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return the handler's response, or an error as a sentence of plain text."""
    try:
        return await handler(request)
    except Exception as error:
        response = build_error_response(error)
        if response is None:
            logger.exception("answering %s failed", request.path)
            return web.Response(status=500, text="defect in the operator; its log has the details\n")
        return web.Response(status=response.status, text=f"{response.sentence}\n", headers=response.headers)


class Exposition:
    """Serves the metrics; `answer` is a request handler, `clock` in seconds."""

    def __init__(self, make: Callable[[], bytes], clock: Callable[[], float]) -> None:
        self._make = make
        self._clock = clock
        self._text = b""
        self._at = float("-inf")

    def render(self) -> bytes:
        """Return the text for Prometheus."""
        if self._clock() - self._at >= FRESH_SECONDS:
            self._text, self._at = self._make(), self._clock()
        return self._text

    async def answer(self, _request: web.Request) -> web.StreamResponse:
        """Handle GET /metrics."""
        return web.Response(body=self.render(), headers={"Content-Type": CONTENT_TYPE})


class ProbeServer:
    """Answers probes; each check returns "" when it passes, else a sentence. Its clients are anonymous."""

    def __init__(self, *, live: Callable[[], str], ready: Callable[[], str], metrics: Exposition | None = None) -> None:
        self._live = live
        self._ready = ready
        self._metrics = metrics
        # A kubelet shares its address with other processes on its node's network, so no address is blocked.
        self._http = HttpServer(answer_errors, max_anonymous=MAX_CONNECTIONS, max_failed=0)

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises OSError."""
        routes = [web.get("/livez", self._serve_livez), web.get("/readyz", self._serve_readyz)]
        if self._metrics is not None:
            routes.append(web.get("/metrics", self._metrics.answer))
        return await self._http.open(routes, host, port, None)

    async def stop(self) -> None:
        """Close."""
        await self._http.close()

    async def _serve_livez(self, _request: web.Request) -> web.StreamResponse:
        return _probe_response(self._live())

    async def _serve_readyz(self, _request: web.Request) -> web.StreamResponse:
        return _probe_response(self._ready())


def _probe_response(problem: str) -> web.Response:
    return web.Response(status=503 if problem else 200, text=(problem or "ok") + "\n")


class EndpointServer:
    """Serves metrics and pages over HTTPS."""

    def __init__(
        self,
        access: Access,
        metrics: Exposition | None = None,
        *,
        jobs: Jobs | None = None,
        clock: Callable[[], float] = time.time,
        on_answer: Callable[[str, int], None] = lambda _path, _status: None,
    ) -> None:
        """Serve metrics and pages of jobs where given; `on_answer(path, status)` is called after every response."""
        self._access = access
        self._metrics = metrics
        self._pages = Pages(jobs, self._admit, clock) if jobs is not None else None
        self.http = HttpServer(answer_errors, on_answer=on_answer, max_anonymous=MAX_ANONYMOUS)

    async def start(self, host: str, port: int, context: ssl.SSLContext) -> int:
        """Listen and return the port, which matters for port 0. Raises OSError."""
        routes = self._pages.list_routes() if self._pages is not None else []
        if self._metrics is not None:
            routes.append(web.get(METRICS.path, partial(self._serve_metrics, self._metrics)))
        return await self.http.open(routes, host, port, context)

    async def stop(self) -> None:
        """Close."""
        await self.http.close()

    async def _serve_metrics(self, metrics: Exposition, request: web.Request) -> web.StreamResponse:
        await self._admit(request, METRICS)
        return await metrics.answer(request)

    async def _admit(
        self, request: web.Request, attributes: ResourceAttributes
    ) -> Callable[[ResourceAttributes], Awaitable[bool]]:
        """Authorize the request's user; return a check of this user's other rights."""
        source = request.remote or ""
        user = await self._access.admit(request.headers.get("Authorization", ""), attributes, source)
        self.http.assign_connection(request, user.name)
        return lambda other: self._access.may(user, other, source)
