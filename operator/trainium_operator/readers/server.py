"""The HTTPS server for readers, Prometheus and people: the API server authorises every request before it is answered.

Invariants: whoever leads, every replica answers for itself; a body is never read; a connection is a stranger's until
its user was allowed something.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from trainium_operator.entrance.reception import Reception
from trainium_operator.readers.access import ReadPath
from trainium_operator.readers.answers import answered
from trainium_operator.readers.pages import Pages

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from trainium_operator.readers.access import Access, Deed
    from trainium_operator.readers.exposition import Exposition
    from trainium_operator.readers.pages import Jobs

MOST_STRANGERS = 256
METRICS = ReadPath("/metrics")


class ReadersServer:
    """`start`, then `stop`."""

    def __init__(
        self,
        access: Access,
        metrics: Exposition | None = None,
        *,
        jobs: Jobs | None = None,
        clock: Callable[[], float] = time.time,
        on_answer: Callable[[str, int], None] = lambda _path, _status: None,
    ) -> None:
        """Serves metrics, and pages of jobs, where they are given. `on_answer(path, status)` sees every answer."""
        self._access = access
        self._metrics = metrics
        self._pages = Pages(jobs, self._admit, clock) if jobs is not None else None
        self.reception = Reception(answered, on_answer=on_answer, most_strangers=MOST_STRANGERS)

    async def start(self, host: str, port: int, context: ssl.SSLContext) -> int:
        """Listen; returns the port, which matters when 0 was asked for. Raises OSError."""
        routes = self._pages.routes() if self._pages is not None else []
        if self._metrics is not None:
            routes.append(web.get(METRICS.path, partial(self._exposition, self._metrics)))
        return await self.reception.open(routes, host, port, context)

    async def stop(self) -> None:
        """Close."""
        await self.reception.close()

    async def _exposition(self, metrics: Exposition, request: web.Request) -> web.StreamResponse:
        await self._admit(request, METRICS)
        return await metrics.answer(request)

    async def _admit(self, request: web.Request, deed: Deed) -> Callable[[Deed], Awaitable[bool]]:
        """Let a user in who may do this; says then what else they may."""
        source = request.remote or ""
        user = await self._access.admit(request.headers.get("Authorization", ""), deed, source)
        self.reception.proved(request, user.name)
        return lambda other: self._access.may(user, other, source)
