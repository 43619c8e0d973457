"""The HTTPS server that Prometheus reads from: every request is authorised by the API server before it is answered.

Invariants: whoever leads, every replica answers for itself; a body is never read; a connection is a stranger's until
its user was allowed something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from trainium_operator.entrance.reception import Reception
from trainium_operator.readers.access import Deed
from trainium_operator.readers.answers import answered

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from trainium_operator.readers.access import Access
    from trainium_operator.readers.exposition import Exposition

MOST_STRANGERS = 256
METRICS = Deed("/metrics")


class ReadersServer:
    """`start`, then `stop`."""

    def __init__(
        self,
        access: Access,
        metrics: Exposition,
        *,
        on_answer: Callable[[str, int], None] = lambda _path, _status: None,
    ) -> None:
        """`on_answer(path, status)` sees every answer."""
        self._access = access
        self._metrics = metrics
        self.reception = Reception(answered, on_answer=on_answer, most_strangers=MOST_STRANGERS)

    async def start(self, host: str, port: int, context: ssl.SSLContext) -> int:
        """Listen; returns the port, which matters when 0 was asked for. Raises OSError."""
        return await self.reception.open([web.get(METRICS.path, self._exposition)], host, port, context)

    async def stop(self) -> None:
        """Close."""
        await self.reception.close()

    async def _exposition(self, request: web.Request) -> web.StreamResponse:
        await self._admit(request, METRICS)
        return await self._metrics.answer(request)

    async def _admit(self, request: web.Request, deed: Deed) -> None:
        authorization = request.headers.get("Authorization", "")
        user = await self._access.admit(authorization, deed, request.remote or "")
        self.reception.proved(request, user.name)
