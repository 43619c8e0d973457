"""Authenticate agents by their projected ServiceAccount token, which the API server reviews and which names the pod.

Guarantees:
- A token is valid only for this audience, for the pod that it was issued to (name and uid are in it), and for the job
  that controls this pod in the cache. So an agent cannot act for another pod, and a token stolen from one job is
  useless for another. `http/reviews.py` has the times.
- Tokens are never logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trainium_contract.wire.worker_env import TOKEN_AUDIENCE
from trainium_operator.http.errors import ForbiddenError, PodDeletedError, UnauthenticatedError
from trainium_operator.http.reviews import AcceptedReview, ClientKey, ReviewCache, ReviewRequest, TokenReviewQueue
from trainium_operator.http.tokens import bearer_token, token_digest, unverified_claims, unverified_expiry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trainium_operator.plan.model.names import JobId

_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
_SERVICE_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True)
class Caller:
    """A pod that a token was issued to."""

    namespace: str
    pod_name: str
    pod_uid: str


class PodDirectory(Protocol):
    """The worker pods that exist."""

    def find_job(self, namespace: str, pod_name: str, pod_uid: str) -> JobId | None:
        """Return the job of this incarnation of the pod; None if it is not a worker of an existing job."""
        ...

    def is_orphaned(self, namespace: str, pod_name: str, pod_uid: str) -> bool:
        """Return whether this incarnation of the pod is a worker of a job that was deleted."""
        ...


class Authenticator:
    """Check tokens; `review` posts the spec of a TokenReview and returns its status."""

    def __init__(
        self,
        review: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
        pods: PodDirectory,
        *,
        wall_clock: Callable[[], float],
    ) -> None:
        self._review = review
        self._pods = pods
        self._reviews: ReviewCache[Caller] = ReviewCache(TokenReviewQueue(wall_clock), wall_clock)

    async def identify(self, authorization: str, source: str = "") -> Caller:
        """Return the worker pod that the token was issued to; `source` is the address of the client.

        Raises UnauthenticatedError, ForbiddenError, TooManyRequestsError and ReviewUnavailableError with a sentence.
        """
        caller = await self._authenticate(authorization, source)
        self._find_job(caller)
        return caller

    def check(self, caller: Caller, *, namespace: str, job: str, pod_name: str, pod_uid: str) -> JobId:
        """Return the caller's job if the caller is the pod that it claims to be. Raises ForbiddenError."""
        if (caller.pod_name, caller.pod_uid) != (pod_name, pod_uid):
            raise ForbiddenError(
                f"the token was issued to pod {caller.pod_name}, and this message speaks for another pod"
            )
        if caller.namespace != namespace:
            raise ForbiddenError(f"the token belongs to namespace {caller.namespace}, not to {namespace}")
        owner = self._find_job(caller)
        if (owner.namespace, owner.name) != (namespace, job):
            raise ForbiddenError(f"pod {caller.pod_name} works for job {owner.name}, not for {job}")
        return owner

    def _find_job(self, caller: Caller) -> JobId:
        owner = self._pods.find_job(caller.namespace, caller.pod_name, caller.pod_uid)
        if owner is None and self._pods.is_orphaned(caller.namespace, caller.pod_name, caller.pod_uid):
            raise PodDeletedError(f"the TrainingJob of pod {caller.pod_name} no longer exists")
        if owner is None:
            raise ForbiddenError(
                f"pod {caller.pod_name} is not a worker of any TrainingJob that exists. If its job was deleted without "
                f"it (--cascade=orphan), delete it: kubectl delete pod {caller.pod_name} -n {caller.namespace}"
            )
        return owner

    async def _authenticate(self, authorization: str, source: str) -> Caller:
        token = bearer_token(authorization)
        if not token:
            raise UnauthenticatedError("send the pod's projected token as `Authorization: Bearer <token>`")
        request = ReviewRequest(token_digest(token), partial(self._client, token, source), partial(self._ask, token))
        caller = await self._reviews.get(request)
        if caller is None:
            raise UnauthenticatedError(f"the token is not valid (any more) for audience {TOKEN_AUDIENCE}")
        return caller

    def _client(self, token: str, source: str) -> ClientKey:
        """Return the queue of the token by its unverified claims, which determine only the order."""
        encoded = unverified_claims(token).get("kubernetes.io")
        pod = encoded.get("pod") if isinstance(encoded, dict) else None
        if not isinstance(encoded, dict) or not isinstance(pod, dict):
            return ClientKey(source)
        namespace, name, uid = encoded.get("namespace"), pod.get("name"), pod.get("uid")
        if not (isinstance(namespace, str) and isinstance(name, str) and isinstance(uid, str)):
            return ClientKey(source)
        return ClientKey(source, uid if self._pods.find_job(namespace, name, uid) is not None else "")

    async def _ask(self, token: str) -> AcceptedReview[Caller] | None:
        caller = _caller_from_status(await self._review({"token": token, "audiences": [TOKEN_AUDIENCE]}))
        return AcceptedReview(caller, unverified_expiry(token)) if caller is not None else None


def _caller_from_status(status: dict[str, Any]) -> Caller | None:
    """Return the pod in a TokenReview's status; None if the token is invalid or not bound to a pod."""
    if not status.get("authenticated") or TOKEN_AUDIENCE not in (status.get("audiences") or ()):
        return None
    user = status.get("user") or {}
    username: str = user.get("username", "")
    extra = user.get("extra") or {}
    pod_name, pod_uid = extra.get(_POD_NAME), extra.get(_POD_UID)
    if not username.startswith(_SERVICE_ACCOUNT) or not pod_name or not pod_uid:
        return None
    return Caller(username.removeprefix(_SERVICE_ACCOUNT).partition(":")[0], pod_name[0], pod_uid[0])
