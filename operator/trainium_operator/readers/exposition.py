"""The metrics as text, made at most once a second, however many ask: making them takes time of the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRESH_SECONDS = 1.0


class Exposition:
    """`answer` is a handler of requests; `clock` in seconds."""

    def __init__(self, make: Callable[[], bytes], clock: Callable[[], float]) -> None:
        self._make = make
        self._clock = clock
        self._made = b""
        self._at = float("-inf")

    def text(self) -> bytes:
        """For Prometheus."""
        if self._clock() - self._at >= FRESH_SECONDS:
            self._made, self._at = self._make(), self._clock()
        return self._made

    async def answer(self, _request: web.Request) -> web.StreamResponse:
        """GET /metrics."""
        return web.Response(body=self.text(), headers={"Content-Type": CONTENT_TYPE})
