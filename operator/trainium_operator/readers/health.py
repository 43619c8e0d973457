"""/livez and /readyz over HTTP, for kubelets; /metrics too, unless it is served over HTTPS.

Invariants: live means that the event loop turns and every watch has heard from the API server lately (its bookmarks
count), unless the API server itself is away: restarting us would not bring it back; ready means that the caches are in
sync, whether or not this replica leads. Nobody is known here, so a connection stays as long as a stranger's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from trainium_operator.entrance.reception import Reception
from trainium_operator.readers.answers import answered

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.readers.exposition import Exposition

MOST_CONNECTIONS = 256


class HealthServer:
    """Answers probes; each check returns "" when it passes, else a sentence."""

    def __init__(self, *, live: Callable[[], str], ready: Callable[[], str], metrics: Exposition | None = None) -> None:
        self._live = live
        self._ready = ready
        self._metrics = metrics
        # A kubelet shares its address with whatever else runs on the network of its node, so no address is shut out.
        self._reception = Reception(answered, most_strangers=MOST_CONNECTIONS, most_in_vain=0)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        routes = [web.get("/livez", self._livez), web.get("/readyz", self._readyz)]
        if self._metrics is not None:
            routes.append(web.get("/metrics", self._metrics.answer))
        return await self._reception.open(routes, host, port, None)

    async def stop(self) -> None:
        """Close."""
        await self._reception.close()

    async def _livez(self, _request: web.Request) -> web.StreamResponse:
        return _probed(self._live())

    async def _readyz(self, _request: web.Request) -> web.StreamResponse:
        return _probed(self._ready())


def _probed(problem: str) -> web.Response:
    return web.Response(status=503 if problem else 200, text=(problem or "ok") + "\n")
