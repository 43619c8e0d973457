"""Authenticate agents by their projected ServiceAccount token, which names the pod that it was issued to.

Guarantees:
- A token is valid only for this audience, for its pod (name and uid are in it), and for the job that controls this pod
  in the cache. So an agent cannot act for another pod, and a token stolen from one job is useless for another.
- The token of a pod that was deleted is refused, because the cache has no pod with its uid any more.
- The API server issues a token for a pod only to the ServiceAccount of this pod, so the account is not compared again.
- Tokens are never logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_operator.http.errors import ForbiddenError, UnauthenticatedError
from trainium_operator.http.tokens import read_bearer_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trainium_contract.wire.messages import HeartbeatRequest, RegisterRequest
    from trainium_operator.plan.model.names import JobId


@dataclass(frozen=True, slots=True)
class Caller:
    """A pod that a token was issued to."""

    namespace: str
    pod_name: str
    pod_uid: str
    expires_at: float
    """When its token expires, in Unix seconds."""


class Authenticator:
    """Check tokens.

    `verify` returns the claims of a valid one (`TokenVerifier`). `find_worker_job(namespace, pod, uid)` returns the job
    of this incarnation of the pod, None if it is not a worker of an existing job, and raises PodDeletedError if its job
    was deleted.
    """

    def __init__(
        self,
        verify: Callable[[str], Awaitable[dict[str, Any]]],
        find_worker_job: Callable[[str, str, str], JobId | None],
    ) -> None:
        self._verify = verify
        self._find_worker_job = find_worker_job

    async def identify(self, authorization: str) -> Caller:
        """Return the worker pod that the token was issued to.

        Raises UnauthenticatedError, ForbiddenError and AuthenticationUnavailableError with a sentence.
        """
        token = read_bearer_token(authorization)
        if not token:
            raise UnauthenticatedError("send the pod's projected token as `Authorization: Bearer <token>`")
        caller = _read_caller(await self._verify(token))
        self._find_job(caller)
        return caller

    def check(self, caller: Caller, message: RegisterRequest | HeartbeatRequest) -> JobId:
        """Return the caller's job if the caller is the pod that the message names. Raises ForbiddenError."""
        if (caller.pod_name, caller.pod_uid) != (message.pod_name, message.pod_uid):
            raise ForbiddenError(
                f"the token was issued to pod {caller.pod_name}, and this message speaks for another pod"
            )
        if caller.namespace != message.namespace:
            raise ForbiddenError(f"the token belongs to namespace {caller.namespace}, not to {message.namespace}")
        owner = self._find_job(caller)
        if (owner.namespace, owner.name) != (message.namespace, message.job):
            raise ForbiddenError(f"pod {caller.pod_name} works for job {owner.name}, not for {message.job}")
        return owner

    def _find_job(self, caller: Caller) -> JobId:
        owner = self._find_worker_job(caller.namespace, caller.pod_name, caller.pod_uid)
        if owner is None:
            raise ForbiddenError(
                f"pod {caller.pod_name} is not a worker of any TrainingJob that exists. If its job was deleted without "
                f"it (--cascade=orphan), delete it: kubectl delete pod {caller.pod_name} -n {caller.namespace}"
            )
        return owner


def _read_caller(claims: dict[str, Any]) -> Caller:
    """Return the pod that verified claims name. Raises UnauthenticatedError if they name none."""
    match claims:
        case {
            "sub": str(subject),
            "exp": int() | float() as expires_at,
            "kubernetes.io": {"namespace": str(namespace), "pod": {"name": str(name), "uid": str(uid)}},
        } if subject.startswith(f"system:serviceaccount:{namespace}:"):
            return Caller(namespace, name, uid, expires_at)
    raise UnauthenticatedError("the token was not issued to a pod")
