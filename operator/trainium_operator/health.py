"""/livez, /readyz and /metrics over HTTP.

Invariants: live means that the event loop turns and every watch has heard from the API server lately (its bookmarks
count), unless the API server itself is away: restarting us would not bring it back; ready means that the caches are in
sync, whether or not this replica leads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HealthServer:
    """Answers probes; each check returns "" when it passes, else a sentence."""

    def __init__(self, *, live: Callable[[], str], ready: Callable[[], str], metrics: Callable[[], bytes]) -> None:
        self._live = live
        self._ready = ready
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        application = web.Application(client_max_size=1024)
        application.router.add_get("/livez", self._livez)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._exposition)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Close."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _livez(self, _request: web.Request) -> web.Response:
        return _answer(self._live())

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _answer(self._ready())

    async def _exposition(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": CONTENT_TYPE})


def _answer(problem: str) -> web.Response:
    return web.Response(status=503 if problem else 200, text=(problem or "ok") + "\n")
