"""The HTTPS server on which agents open their streams.

Guarantees:
- It answers 503 unless this process leads and its caches are in sync. A request for a stream waits a moment while the
  lead is pending, so that agents are connected when this process takes over.
- The sender of a stream is authenticated as a worker before a frame of it is read.
- Frames, waits and connections are bounded in size, number and time. Every refusal is one sentence (`ErrorResponse`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from aiohttp import web

from trainium_contract.wire.messages import ErrorResponse, HeartbeatRequest
from trainium_contract.wire.stream import STREAM_PATH, UPGRADE
from trainium_operator.coordinator.messages import BadMessageError
from trainium_operator.coordinator.streams import MAX_CONNECTION_SECONDS, Stream, Streams
from trainium_operator.http.errors import ForbiddenError
from trainium_operator.http.listener import BROKEN
from trainium_operator.http.server import RETRY_AFTER, HttpServer, Upgrade, build_error_response

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Mapping

    from trainium_operator.coordinator.authentication import Authenticator
    from trainium_operator.coordinator.state import CoordinatorState
    from trainium_operator.plan.model.names import JobId

logger = logging.getLogger(__name__)

PENDING_LEAD_SECONDS = 2.5
"""Longest wait of a stream request for a pending lead; shorter than the time-out of agents."""


class CoordinatorServer:
    """Serves streams over a state with a longer lifetime."""

    def __init__(
        self,
        state: CoordinatorState,
        authenticator: Authenticator,
        *,
        is_serving: Callable[[], bool],
        notify: Callable[[str, str, bool], None],
        until_serving: Callable[[], Awaitable[object] | None] = lambda: None,
        on_message: Callable[[str, int], None] = lambda _kind, _status: None,
        on_change: Callable[[HeartbeatRequest, HeartbeatRequest], None] = lambda _before, _now: None,
        has_failed: Callable[[JobId], bool] = lambda _job_id: False,
    ) -> None:
        """`notify(namespace, job, at_once)`: the plan should see what has changed, at once or within a while.

        `until_serving` returns what to wait for while this process is about to serve, and None when another serves.
        """
        self._authenticator = authenticator
        self._is_serving = is_serving
        self._until_serving = until_serving
        self.streams = Streams(
            state,
            authenticator,
            is_serving=is_serving,
            notify=notify,
            on_change=on_change,
            on_message=on_message,
            has_failed=has_failed,
        )
        self._sweeping: asyncio.Task[None] | None = None
        self.http = HttpServer(
            self._answer_errors, on_answer=lambda path, status: on_message(path.rpartition("/")[2], status)
        )

    async def start(self, host: str, port: int, context: ssl.SSLContext | None) -> int:
        """Listen and return the port, which matters for port 0. Raises OSError."""
        self._sweeping = asyncio.create_task(self.streams.run())
        return await self.http.open((web.get(STREAM_PATH, self._serve_stream),), host, port, context)

    async def stop(self) -> None:
        """End streams with 503 and close."""
        self.streams.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self.http.close()

    async def _serve_stream(self, request: web.Request) -> web.StreamResponse:
        caller = await self._authenticator.identify(request.headers.get("Authorization", ""))
        self.http.assign_connection(request, caller.pod_uid)
        known_generation = _parse_number(request.query, "after", 0)
        if request.query.get("podUid", "") != caller.pod_uid:
            message = f"the token was issued to pod {caller.pod_name}, and this stream speaks for another pod"
            raise ForbiddenError(message)
        if request.headers.get("Upgrade", "").lower() != UPGRADE:
            return _build_error_response(426, f"ask for `Upgrade: {UPGRADE}`", headers={"Upgrade": UPGRADE})
        seconds = min(MAX_CONNECTION_SECONDS, caller.expires_at - time.time())
        expires_at = asyncio.get_running_loop().time() + seconds

        def create_stream(on_closed: Callable[[], None]) -> Stream:
            return Stream(
                self.streams, caller, known_generation=known_generation, expires_at=expires_at, on_closed=on_closed
            )

        return Upgrade(UPGRADE, create_stream)

    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not self._is_serving() and not await self._wait_for_lead(request):
            return _build_error_response(503, "not leader", headers=RETRY_AFTER)
        try:
            return await handler(request)
        except Exception as error:
            refusal = build_error_response(error)
            if refusal is None:
                logger.exception("answering %s failed", request.path)
                return _build_error_response(500, "defect in the coordinator; its log has the details")
            if isinstance(error, ForbiddenError):
                logger.warning("refused %s: %s", request.path, error)
            if isinstance(error, BROKEN):
                broke = type(error).__name__
                logger.info("%s: the connection broke before the request was read (%s)", request.path, broke)
            return _build_error_response(refusal.status, refusal.sentence, headers=refusal.headers)

    async def _wait_for_lead(self, request: web.Request) -> bool:
        """Hold a request for a stream while the lead is pending; return whether this process took over meanwhile."""
        pending = self._until_serving() if request.path == STREAM_PATH else None
        if pending is None:
            return False
        try:
            async with asyncio.timeout(PENDING_LEAD_SECONDS):
                await pending
        except TimeoutError:
            return False
        return self._is_serving()


def _parse_number(query: Mapping[str, str], key: str, default: int) -> int:
    text = query.get(key, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise BadMessageError(f"{key} must be a whole number from 0 to 999999999, not {text[:40]!r}")
    return int(text)


def _build_error_response(status: int, sentence: str, *, headers: Mapping[str, str] | None = None) -> web.Response:
    body = ErrorResponse(error=sentence).model_dump_json(by_alias=True, exclude_none=True).encode()
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
