"""Who an agent is: its projected ServiceAccount token, checked by the API server and bound to the calling pod.

Invariants: a token counts only for our audience, only for the pod that it was issued to (name and uid are in it), and
only for the job whose pod that is in our own cache; so an agent can speak for nobody else, and a token that was stolen
from one job opens no other. Answers are remembered by the token's SHA-256 for at most a minute and never past its
expiry; only while the API server does not answer, an answer that was positive may be used longer. Refusals are kept
apart, so that no flood of them drives out what is known of agents. Tokens are never logged.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from trainium_contract.wire.worker_env import TOKEN_AUDIENCE
from trainium_operator.coordinator.review_desk import FloodedError, Lane, ReviewDesk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trainium_operator.plan.model.job_id import JobId

_V = TypeVar("_V")

CACHE_SECONDS = 60.0
_RENEW_AFTER = tuple(CACHE_SECONDS * (0.5 + 0.4 * part / 16) for part in range(16))
"""Age from which on an answer is renewed while it is still used."""
REFUSAL_SECONDS = 5.0
STALE_SECONDS = 600.0
REMEMBERED = 20_000
REFUSALS_REMEMBERED = 4_096
LONGEST_TOKEN = 8_000
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
_SERVICE_ACCOUNT = "system:serviceaccount:"


class UnauthenticatedError(Exception):
    """401: no token, or not a valid one for us."""


class RefusedError(Exception):
    """403: a valid token, but of somebody who may not say this."""


class ReviewUnavailableError(Exception):
    """503: the API server could not tell."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A pod that a token was issued to."""

    namespace: str
    pod_name: str
    pod_uid: str


class PodDirectory(Protocol):
    """Which worker pods exist."""

    def job_of(self, namespace: str, pod_name: str, pod_uid: str) -> JobId | None:
        """The job that this incarnation of the pod works for; None when it is no worker of a job that exists."""
        ...


@dataclass(frozen=True, slots=True)
class _Remembered:
    caller: Caller
    reviewed: float
    expires: float | None


class Authenticator:
    """Checks tokens; `review` posts a TokenReview body and answers its status. Raises ReviewUnavailableError."""

    def __init__(
        self,
        review: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
        pods: PodDirectory,
        *,
        wall_clock: Callable[[], float],
    ) -> None:
        self._review = review
        self._pods = pods
        self._wall_clock = wall_clock
        self._known: OrderedDict[bytes, _Remembered] = OrderedDict()
        self._refused: OrderedDict[bytes, float] = OrderedDict()
        """When the API server last said that a token is not valid."""
        self._under_way: dict[bytes, asyncio.Future[Caller | None]] = {}
        self._desk = ReviewDesk(wall_clock)

    async def admit(
        self,
        authorization: str,
        *,
        namespace: str,
        job: str,
        pod_name: str | None,
        pod_uid: str,
        source: str = "",
    ) -> JobId:
        """The job that the caller may speak for, as the pod that it says it is; `identify` and `check`."""
        caller = await self.identify(authorization, source)
        return self.check(caller, namespace=namespace, job=job, pod_name=pod_name, pod_uid=pod_uid)

    async def identify(self, authorization: str, source: str = "") -> Caller:
        """The worker pod that the token was issued to; `source` is the address that it came from.

        Raises UnauthenticatedError, RefusedError, FloodedError and ReviewUnavailableError, each with a sentence.
        """
        caller = await self._caller(authorization, source)
        self._job_of(caller)
        return caller

    def check(self, caller: Caller, *, namespace: str, job: str, pod_name: str | None, pod_uid: str) -> JobId:
        """The job that the caller may speak for, as the pod that it says it is. Raises RefusedError."""
        if caller.pod_uid != pod_uid or (pod_name is not None and caller.pod_name != pod_name):
            raise RefusedError(
                f"the token was issued to pod {caller.pod_name}, and this message speaks for another pod"
            )
        if caller.namespace != namespace:
            raise RefusedError(f"the token belongs to namespace {caller.namespace}, not to {namespace}")
        owner = self._job_of(caller)
        if (owner.namespace, owner.name) != (namespace, job):
            raise RefusedError(f"pod {caller.pod_name} works for job {owner.name}, not for {job}")
        return owner

    def _job_of(self, caller: Caller) -> JobId:
        owner = self._pods.job_of(caller.namespace, caller.pod_name, caller.pod_uid)
        if owner is None:
            raise RefusedError(f"pod {caller.pod_name} is not a worker of any TrainingJob that exists")
        return owner

    async def _caller(self, authorization: str, source: str) -> Caller:
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > LONGEST_TOKEN:
            raise UnauthenticatedError("send the pod's projected token as `Authorization: Bearer <token>`")
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        now = self._wall_clock()
        caller = None
        if now - self._refused.get(digest, -REFUSAL_SECONDS) >= REFUSAL_SECONDS:
            caller = await self._accepted(digest, token, source, now)
        if caller is None:
            raise UnauthenticatedError(f"the token is not valid (any more) for audience {TOKEN_AUDIENCE}")
        return caller

    async def _accepted(self, digest: bytes, token: str, source: str, now: float) -> Caller | None:
        known = self._known.get(digest)
        if known is None or not _is_fresh(known, now):
            return await self._reviewed(digest, token, source, known)
        self._known.move_to_end(digest)
        if now >= known.reviewed + _RENEW_AFTER[digest[0] % len(_RENEW_AFTER)]:
            # Nobody waits for an answer that is only renewed; agents that came together are asked about apart.
            self._begin_review(digest, token, source)
        return known.caller

    async def _reviewed(self, digest: bytes, token: str, source: str, known: _Remembered | None) -> Caller | None:
        """Ask once, however many messages with this token wait for the answer."""
        under_way = self._begin_review(digest, token, source)
        try:
            return await asyncio.shield(under_way)
        except (ReviewUnavailableError, FloodedError):
            now = self._wall_clock()
            usable = known is not None and now - known.reviewed < STALE_SECONDS
            if known is not None and usable and (known.expires is None or now < known.expires):
                # Training must not stop because the API server restarts; the pod itself is still in our cache.
                return known.caller
            raise

    def _begin_review(self, digest: bytes, token: str, source: str) -> asyncio.Future[Caller | None]:
        under_way = self._under_way.get(digest)
        if under_way is None:
            under_way = asyncio.ensure_future(self._ask(digest, token, self._lane(token, source)))
            self._under_way[digest] = under_way
            under_way.add_done_callback(lambda done: self._answered(digest, done))
        return under_way

    def _answered(self, digest: bytes, done: asyncio.Future[Caller | None]) -> None:
        del self._under_way[digest]
        if not done.cancelled():
            done.exception()  # also when all who waited for it have gone: nobody else will look

    def _lane(self, token: str, source: str) -> Lane:
        """By what the token says of itself, which nobody has checked yet: it decides on the order alone."""
        said = _claims(token).get("kubernetes.io")
        pod = said.get("pod") if isinstance(said, dict) else None
        if not isinstance(said, dict) or not isinstance(pod, dict):
            return Lane(source)
        namespace, name, uid = said.get("namespace"), pod.get("name"), pod.get("uid")
        if not (isinstance(namespace, str) and isinstance(name, str) and isinstance(uid, str)):
            return Lane(source)
        return Lane(source, uid if self._pods.job_of(namespace, name, uid) is not None else "")

    async def _ask(self, digest: bytes, token: str, lane: Lane) -> Caller | None:
        body = {"spec": {"token": token, "audiences": [TOKEN_AUDIENCE]}}
        caller = _caller_of(await self._desk.ask(lane, lambda: self._review(body)))
        now, expires = self._wall_clock(), _expiry(token)
        if caller is None:
            self._known.pop(digest, None)
            _remember(self._refused, digest, now, REFUSALS_REMEMBERED)
            self._desk.refused(lane)
            return None
        if expires is not None and expires <= now:
            expires = None  # the API server has just accepted it: it is our clock that is wrong
        self._refused.pop(digest, None)
        _remember(self._known, digest, _Remembered(caller, now, expires), REMEMBERED)
        return caller


def _remember(among: OrderedDict[bytes, _V], digest: bytes, value: _V, most: int) -> None:
    among[digest] = value
    among.move_to_end(digest)
    while len(among) > most:
        among.popitem(last=False)


def _is_fresh(known: _Remembered, now: float) -> bool:
    return now - known.reviewed < CACHE_SECONDS and (known.expires is None or now < known.expires)


def _caller_of(status: dict[str, Any]) -> Caller | None:
    """The pod in a TokenReview's status; None when the token is not valid, not for us, or not bound to a pod."""
    if not status.get("authenticated") or TOKEN_AUDIENCE not in (status.get("audiences") or ()):
        return None
    user = status.get("user") or {}
    username: str = user.get("username", "")
    extra = user.get("extra") or {}
    pod_name, pod_uid = extra.get(_POD_NAME), extra.get(_POD_UID)
    if not username.startswith(_SERVICE_ACCOUNT) or not pod_name or not pod_uid:
        return None
    return Caller(username.removeprefix(_SERVICE_ACCOUNT).partition(":")[0], pod_name[0], pod_uid[0])


def _expiry(token: str) -> float | None:
    """`exp` of a JWT, whose signature the API server has just checked; None for a token of another form."""
    found = _claims(token).get("exp")
    try:
        return float(found) if isinstance(found, int | float) else None
    except OverflowError:
        return None


def _claims(token: str) -> dict[str, Any]:
    """What a JWT says, which this does not check; nothing for a token of another form."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}
