"""The HTTPS server that agents call: register, long poll for membership, heartbeat.

Invariants: nothing is answered but 503 unless this process leads and its caches are in sync (a registration waits a
moment where that is due, so that agents are there when the lead is taken over); every message is
authenticated before it is believed, and its sender is a worker before its body is read; bodies, waits and connections
are bounded in size, number and time; every refusal is one sentence (`ErrorResponse`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from aiohttp import web
from pydantic import ValidationError

from trainium_contract.wire.messages import (
    HEARTBEAT_PATH,
    MEMBERSHIP_PATH,
    PREVIOUS_PROTOCOL,
    PROTOCOL,
    REGISTER_PATH,
    ErrorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
)
from trainium_operator.coordinator.reading import read_message
from trainium_operator.coordinator.spoken import Phrasebook
from trainium_operator.coordinator.state import FutureGenerationError, NotRegisteredError, OldGenerationError
from trainium_operator.entrance.door import BROKEN
from trainium_operator.entrance.errors import RefusedError
from trainium_operator.entrance.reception import RETRY_AFTER, Reception, refusal_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Mapping

    from trainium_contract.base import MessageModel
    from trainium_contract.wire.messages import Membership
    from trainium_operator.coordinator.authentication import Authenticator, Caller
    from trainium_operator.coordinator.state import CoordinatorState
    from trainium_operator.plan.model.job_id import JobId

logger = logging.getLogger(__name__)

LARGEST_BODY = 832 * 1024
"""Above the largest heartbeat that the contract allows, every character of its texts escaped."""
BODY_SECONDS = 5.0
"""Until a body that was begun is there; agents wait for an answer for 3 s."""
LONGEST_POLL = 60.0
SHORTEST_POLL = 0.5
"""A poll is held for this share of the time that it asks for, or longer."""
DUE_SECONDS = 2.5
"""How long a registration waits for a lead that is due; shorter than agents wait for an answer."""
LARGEST_WELCOME = 64
"""Members of a membership that the answer to a registration carries."""
_JSON = "application/json"


class CoordinatorServer:
    """`start`, then `stop`; the state outlives it."""

    def __init__(
        self,
        state: CoordinatorState,
        authenticator: Authenticator,
        *,
        is_serving: Callable[[], bool],
        notify: Callable[[str, str, bool], None],
        until_serving: Callable[[], Awaitable[object] | None] = lambda: None,
        heartbeat_seconds: float = 1.0,
        on_message: Callable[[str, int], None] = lambda _kind, _status: None,
        on_news: Callable[[HeartbeatRequest, HeartbeatRequest], None] = lambda _before, _now: None,
    ) -> None:
        """`notify(namespace, job, at_once)`: the plan should see what has changed, at once or within a while.

        `until_serving` gives what to wait for when this process is about to serve, and None when another does.
        """
        self._state = state
        self._authenticator = authenticator
        self._is_serving = is_serving
        self._notify = notify
        self._until_serving = until_serving
        self._heartbeat_seconds = heartbeat_seconds
        self._on_news = on_news
        self._phrasebook = Phrasebook()
        self.reception = Reception(
            self._answered, on_answer=lambda path, status: on_message(path.rpartition("/")[2], status)
        )

    async def start(self, host: str, port: int, context: ssl.SSLContext | None) -> int:
        """Listen; returns the port, which matters when 0 was asked for. Raises OSError."""
        routes = (
            web.post(REGISTER_PATH, self._register),
            web.post(HEARTBEAT_PATH, self._heartbeat),
            web.get(MEMBERSHIP_PATH, self._membership),
        )
        return await self.reception.open(routes, host, port, context, largest_body=LARGEST_BODY)

    async def stop(self) -> None:
        """End long polls with 503 and close."""
        self._state.close()
        await self.reception.close()

    async def _sender(self, request: web.Request) -> Caller:
        """The worker pod that sent the request, by its token alone."""
        caller = await self._authenticator.identify(request.headers.get("Authorization", ""), request.remote or "")
        self.reception.proved(request, caller.pod_uid)
        return caller

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason=f"the body was not there within {BODY_SECONDS:g} s") from None

    def _job_of(self, caller: Caller, message: RegisterRequest | HeartbeatRequest) -> JobId:
        return self._authenticator.check(
            caller,
            namespace=message.namespace,
            job=message.job,
            pod_name=message.pod_name,
            pod_uid=message.pod_uid,
        )

    async def _register(self, request: web.Request) -> web.StreamResponse:
        caller = await self._sender(request)
        message = read_message(RegisterRequest, await self._body(request))
        job_id = self._job_of(caller, message)
        if self._state.register(job_id, message):
            logger.info("%s registered", message.pod_name, extra={"namespace": message.namespace, "job": message.job})
            self._notify(message.namespace, message.job, True)
        membership = self._state.membership(job_id)
        answer = RegisterResponse(
            protocol=message.protocol,
            heartbeat_seconds=self._heartbeat_seconds,
            membership=_spoken(membership, message.protocol) if _is_small(membership) else None,
            time=time.time(),
        )
        return _json(200, answer)

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        caller = await self._sender(request)
        message = read_message(HeartbeatRequest, await self._body(request))
        job_id = self._job_of(caller, message)
        taken = self._state.heartbeat(job_id, message)
        if taken.matters and taken.before is not None:
            self._on_news(taken.before, message)
        if taken.matters or taken.progressed:
            self._notify(message.namespace, message.job, taken.matters)
        return _json(200, HeartbeatResponse(protocol=message.protocol, generation=self._state.published(job_id)))

    async def _membership(self, request: web.Request) -> web.StreamResponse:
        caller = await self._sender(request)
        pod_uid = request.query.get("podUid", "")
        after = _number(request.query, "after", 0)
        longest = min(LONGEST_POLL, float(_number(request.query, "timeoutSeconds", 30)))
        # Those who heard of a generation together must not all ask again together.
        seconds = longest * random.uniform(SHORTEST_POLL, 1.0)  # noqa: S311 - spreads load, no secret
        job_id = self._authenticator.check(
            caller,
            namespace=request.match_info["namespace"],
            job=request.match_info["job"],
            pod_name=None,
            pod_uid=pod_uid,
        )
        protocol = self._state.heard(job_id, pod_uid).registration.protocol
        membership = await self._state.newer_membership(job_id, after, seconds)
        if self._state.closed or not self._is_serving():
            return _refusal(503, "the coordinator is shutting down; try the next address", headers=RETRY_AFTER)
        if membership is None:
            return web.Response(status=204)
        spoken = self._phrasebook.say(job_id, membership, protocol)
        if spoken.packed is not None and "gzip" in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=spoken.packed, content_type=_JSON, headers={"Content-Encoding": "gzip"})
        return web.Response(body=spoken.plain, content_type=_JSON)

    async def _answered(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not self._is_serving() and not await self._serves_soon(request):
            return _refusal(503, "not leader", headers=RETRY_AFTER)
        try:
            return await handler(request)
        except (ValidationError, _BadMessageError) as error:
            return _refusal(400, _sentence(error))
        except NotRegisteredError:
            return _refusal(404, "this agent has not registered with this coordinator; register first")
        except FutureGenerationError as error:
            logger.warning("refused %s: %s", request.path, error)
            return _refusal(400, str(error))
        except OldGenerationError as error:
            return _refusal(409, str(error), generation=error.current)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is None:
                logger.exception("answering %s failed", request.path)
                return _refusal(500, "defect in the coordinator; its log has the details")
            if isinstance(error, RefusedError) and self.reception.is_new_to_refusals(request):
                logger.warning("refused %s: %s", request.path, error)
            if isinstance(error, BROKEN):
                broke = type(error).__name__
                logger.info("%s: the connection broke before the request was read (%s)", request.path, broke)
            return _refusal(refusal.status, refusal.sentence, headers=refusal.headers)

    async def _serves_soon(self, request: web.Request) -> bool:
        """Hold a registration while the lead is due; whether it was taken over meanwhile."""
        due = self._until_serving() if request.path == REGISTER_PATH else None
        if due is None:
            return False
        try:
            async with asyncio.timeout(DUE_SECONDS):
                await due
        except TimeoutError:
            return False
        return self._is_serving()


class _BadMessageError(Exception):
    """The request cannot be read."""


def _spoken(membership: Membership | None, protocol: int) -> Membership | None:
    """The membership in the protocol that the agent speaks; both have the same fields."""
    return membership.replaced(protocol=protocol) if membership is not None else None


def _is_small(membership: Membership | None) -> bool:
    """Whether it is worth sending with each registration; the long poll that follows at once brings a large one."""
    return membership is None or len(membership.members) <= LARGEST_WELCOME


def _number(query: Mapping[str, str], key: str, default: int) -> int:
    text = query.get(key, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise _BadMessageError(f"{key} must be a whole number from 0 to 999999999, not {text[:40]!r}")
    return int(text)


def _sentence(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    spoken = f"{PREVIOUS_PROTOCOL} and {PROTOCOL}"
    hint = f" (this coordinator speaks protocols {spoken})" if "protocol" in where else ""
    return f"the message is not valid: {where or 'body'}: {first['msg']}{hint}"[:1024]


def _json(status: int, message: MessageModel) -> web.Response:
    body = message.model_dump_json(by_alias=True, exclude_none=True).encode()
    return web.Response(status=status, body=body, content_type=_JSON)


def _refusal(
    status: int, sentence: str, *, generation: int | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    response = _json(status, ErrorResponse(error=sentence, generation=generation))
    response.headers.update(headers or {})
    return response
