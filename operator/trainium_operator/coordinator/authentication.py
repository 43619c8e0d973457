"""Who an agent is: its projected ServiceAccount token, checked by the API server and bound to the calling pod.

Invariants: a token counts only for our audience, only for the pod that it was issued to (name and uid are in it), and
only for the job whose pod that is in our own cache; so an agent can speak for nobody else, and a token that was stolen
from one job opens no other. Answers are remembered by the token's SHA-256 for at most a minute and never past its
expiry; only while the API server does not answer, an answer that was positive may be used longer. Tokens are never
logged.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainium_contract.worker_env import TOKEN_AUDIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CACHE_SECONDS = 60.0
_RENEW_AFTER = tuple(CACHE_SECONDS * (0.5 + 0.4 * part / 16) for part in range(16))
"""Age from which on an answer is renewed while it is still used."""
REFUSAL_SECONDS = 5.0
STALE_SECONDS = 600.0
REMEMBERED = 20_000
LONGEST_TOKEN = 16_384
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

    def job_of(self, namespace: str, pod_name: str, pod_uid: str) -> tuple[str, str] | None:
        """Name and uid of the job that this incarnation of the pod works for; None when it is no worker."""
        ...


@dataclass(frozen=True, slots=True)
class _Remembered:
    caller: Caller | None
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
        self._under_way: dict[bytes, asyncio.Future[Caller | None]] = {}

    async def admit(self, authorization: str, *, namespace: str, job: str, pod_name: str | None, pod_uid: str) -> str:
        """The uid of the job that the caller may speak for, as the pod that it says it is.

        Raises UnauthenticatedError, RefusedError and ReviewUnavailableError, each with a sentence.
        """
        caller = await self._caller(authorization)
        if caller.pod_uid != pod_uid or (pod_name is not None and caller.pod_name != pod_name):
            raise RefusedError(
                f"the token was issued to pod {caller.pod_name}, and this message speaks for another pod"
            )
        if caller.namespace != namespace:
            raise RefusedError(f"the token belongs to namespace {caller.namespace}, not to {namespace}")
        owner = self._pods.job_of(namespace, caller.pod_name, caller.pod_uid)
        if owner is None:
            raise RefusedError(f"pod {caller.pod_name} is not a worker of any TrainingJob that exists")
        if owner[0] != job:
            raise RefusedError(f"pod {caller.pod_name} works for job {owner[0]}, not for {job}")
        return owner[1]

    async def identify(self, authorization: str) -> Caller:
        """The pod that the token was issued to. Raises UnauthenticatedError and ReviewUnavailableError."""
        return await self._caller(authorization)

    async def _caller(self, authorization: str) -> Caller:
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > LONGEST_TOKEN:
            raise UnauthenticatedError("send the pod's projected token as `Authorization: Bearer <token>`")
        digest = hashlib.sha256(token.encode()).digest()
        known = self._known.get(digest)
        now = self._wall_clock()
        if known is None or not self._is_fresh(known, now):
            caller = await self._reviewed(digest, token, known)
        else:
            caller = known.caller
            if caller is not None and now >= known.reviewed + _RENEW_AFTER[digest[0] % len(_RENEW_AFTER)]:
                # Nobody waits for an answer that is only renewed; agents that came together are asked about apart.
                self._begin_review(digest, token)
        if caller is None:
            raise UnauthenticatedError(f"the token is not valid (any more) for audience {TOKEN_AUDIENCE}")
        return caller

    def _is_fresh(self, known: _Remembered, now: float) -> bool:
        if known.caller is None:
            return now - known.reviewed < REFUSAL_SECONDS
        return now - known.reviewed < CACHE_SECONDS and (known.expires is None or now < known.expires)

    async def _reviewed(self, digest: bytes, token: str, known: _Remembered | None) -> Caller | None:
        """Ask once, however many messages with this token wait for the answer."""
        under_way = self._begin_review(digest, token)
        try:
            return await asyncio.shield(under_way)
        except ReviewUnavailableError:
            now = self._wall_clock()
            usable = known is not None and known.caller is not None and now - known.reviewed < STALE_SECONDS
            if known is not None and usable and (known.expires is None or now < known.expires):
                # Training must not stop because the API server restarts; the pod itself is still in our cache.
                return known.caller
            raise

    def _begin_review(self, digest: bytes, token: str) -> asyncio.Future[Caller | None]:
        under_way = self._under_way.get(digest)
        if under_way is None:
            under_way = asyncio.ensure_future(self._ask(digest, token))
            self._under_way[digest] = under_way
            under_way.add_done_callback(lambda done: self._answered(digest, done))
        return under_way

    def _answered(self, digest: bytes, done: asyncio.Future[Caller | None]) -> None:
        del self._under_way[digest]
        if not done.cancelled():
            done.exception()  # also when all who waited for it have gone: nobody else will look

    async def _ask(self, digest: bytes, token: str) -> Caller | None:
        status = await self._review({"spec": {"token": token, "audiences": [TOKEN_AUDIENCE]}})
        caller = _caller_of(status)
        now, expires = self._wall_clock(), _expiry(token)
        if caller is not None and expires is not None and expires <= now:
            expires = None  # the API server has just accepted it: it is our clock that is wrong
        self._known[digest] = _Remembered(caller, now, expires)
        self._known.move_to_end(digest)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return caller


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
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, ValueError, TypeError):
        return None
