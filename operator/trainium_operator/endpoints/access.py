"""Authenticate and authorize readers by the API server's own reviews.

Guarantees:
- A TokenReview (for the API server's audience) decides on a token, a SubjectAccessReview of that user on an action;
  `http/reviews.py` has the times.
- Only a user who was allowed an action counts as known. A valid token alone, which every pod has, gives no precedence.
- Tokens are never logged.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.http.errors import ForbiddenError, UnauthenticatedError
from trainium_operator.http.reviews import AcceptedReview, ClientKey, ReviewCache, ReviewRequest, TokenReviewQueue
from trainium_operator.http.tokens import bearer_token, token_digest, unverified_claims, unverified_expiry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Review = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

MAX_RUNNING = 8
MAX_ANONYMOUS_RUNNING = 2
"""Concurrent reviews for anonymous clients; fewer than for agents, whose training waits."""
REMEMBERED = 1_024
"""Maximum number of entries of tokens, rights and users each; a tenant can request any number of tokens."""


@dataclass(frozen=True, slots=True)
class User:
    """A user, as a TokenReview describes it."""

    name: str
    uid: str
    groups: tuple[str, ...]
    extra: tuple[tuple[str, tuple[str, ...]], ...]


class ResourceAttributes(Protocol):
    """An action that the API server authorizes."""

    def attributes(self) -> dict[str, Any]:
        """Return the part of a SubjectAccessReview's spec that names the action."""
        ...

    def __str__(self) -> str:
        """Return the words that follow `may not`."""
        ...


@dataclass(frozen=True, slots=True)
class PathAttributes:
    """The right to read a path of the operator."""

    path: str
    verb: str = "get"

    def attributes(self) -> dict[str, Any]:
        """Return its attributes; see ResourceAttributes."""
        return {"nonResourceAttributes": {"path": self.path, "verb": self.verb}}

    def __str__(self) -> str:
        return f"{self.verb} the nonResourceURL {self.path}"


@dataclass(frozen=True, slots=True)
class ObjectAttributes:
    """The right to read objects: `get` with a name, `list` without one; no namespace means all."""

    resource: str
    namespace: str
    name: str = ""
    group: str = ""

    @property
    def verb(self) -> str:
        """The verb of the API."""
        return "get" if self.name else "list"

    def attributes(self) -> dict[str, Any]:
        """Return its attributes; see ResourceAttributes."""
        given = {
            "group": self.group,
            "resource": self.resource,
            "verb": self.verb,
            "namespace": self.namespace,
            "name": self.name,
        }
        return {"resourceAttributes": {key: value for key, value in given.items() if value}}

    def __str__(self) -> str:
        what = f"{self.resource}.{self.group}" if self.group else self.resource
        name = f" {self.name}" if self.name else ""
        return f"{self.verb} {what}{name} in {f'namespace {self.namespace}' if self.namespace else 'all namespaces'}"


class Access:
    """Authorizes requests. Both reviewers post the `spec` of their kind and return its `status`."""

    def __init__(self, tokens: Review, rights: Review, *, wall_clock: Callable[[], float]) -> None:
        self._tokens = tokens
        self._rights = rights
        queue = TokenReviewQueue(wall_clock, max_running=MAX_RUNNING, max_anonymous=MAX_ANONYMOUS_RUNNING)
        self._users: ReviewCache[User] = ReviewCache(queue, wall_clock, remembered=REMEMBERED)
        self._allowed: ReviewCache[bool] = ReviewCache(queue, wall_clock, remembered=REMEMBERED)
        self._known: BoundedDict[str, None] = BoundedDict(REMEMBERED)
        """Names of users who were allowed an action, most recent last."""

    async def admit(self, authorization: str, attributes: ResourceAttributes, source: str) -> User:
        """Return the user if the action is allowed; `source` is the address of the client.

        Raises UnauthenticatedError, ForbiddenError, TooManyRequestsError and ReviewUnavailableError with a sentence.
        """
        user = await self._user(authorization, source)
        if not await self.may(user, attributes, source, counts=True):
            raise ForbiddenError(f"{user.name} may not {attributes}")
        self._known[user.name] = None
        return user

    async def _user(self, authorization: str, source: str) -> User:
        token = bearer_token(authorization)
        if not token:
            raise UnauthenticatedError("send a token of this cluster as `Authorization: Bearer <token>`")
        client = partial(self._client_of_token, token, source)
        user = await self._users.get(ReviewRequest(token_digest(token), client, partial(self._review_token, token)))
        if user is None:
            raise UnauthenticatedError("the token is not valid (any more) for the API server of this cluster")
        return user

    async def may(self, user: User, attributes: ResourceAttributes, source: str, *, counts: bool = False) -> bool:
        """Return whether an admitted user may also do this. Raises TooManyRequestsError and ReviewUnavailableError.

        `counts`: whether a refusal counts as an invalid token does.
        """
        spec = _spec(user, attributes)
        digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).digest()
        request = ReviewRequest(
            digest, partial(self._client, user.name, source), partial(self._review_access, spec), counts
        )
        return await self._allowed.get(request) or False

    def _client_of_token(self, token: str, source: str) -> ClientKey:
        """Return the queue of the token by its unverified claims, which determine only the order."""
        subject = unverified_claims(token).get("sub")
        return self._client(subject if isinstance(subject, str) else "", source)

    def _client(self, name: str, source: str) -> ClientKey:
        return ClientKey(source, name if name in self._known else "")

    async def _review_token(self, token: str) -> AcceptedReview[User] | None:
        user = _read_user(await self._tokens({"token": token}))
        return AcceptedReview(user, unverified_expiry(token)) if user is not None else None

    async def _review_access(self, spec: dict[str, Any]) -> AcceptedReview[bool] | None:
        status = await self._rights(spec)
        allowed = status.get("allowed") is True and status.get("denied") is not True
        return AcceptedReview(value=True) if allowed else None


def _spec(user: User, attributes: ResourceAttributes) -> dict[str, Any]:
    return {
        "user": user.name,
        "uid": user.uid,
        "groups": list(user.groups),
        "extra": {key: list(values) for key, values in user.extra},
        **attributes.attributes(),
    }


def _read_user(status: Mapping[str, Any]) -> User | None:
    """Return the user in a TokenReview's status; None if the token is not valid."""
    found = status.get("user") or {}
    if status.get("authenticated") is not True or not found.get("username"):
        return None
    extra = found.get("extra") or {}
    return User(
        name=found["username"],
        uid=found.get("uid") or "",
        groups=tuple(found.get("groups") or ()),
        extra=tuple((key, tuple(extra[key])) for key in sorted(extra)),
    )
