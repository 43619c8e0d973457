"""Authenticate and authorize readers by the API server's own reviews.

Guarantees:
- A TokenReview (for the API server's audience) decides on a token, because readers may be users of any authenticator;
  a SubjectAccessReview of that user decides on an action. `reviews.py` has the times.
- Tokens are never logged.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jwt

from trainium_operator.endpoints.reviews import ReviewCache, ReviewLimiter
from trainium_operator.http.errors import ForbiddenError, UnauthenticatedError
from trainium_operator.http.tokens import read_bearer_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Review = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class User:
    """A user, as a TokenReview describes it."""

    name: str
    spec: dict[str, Any]
    """The part of a SubjectAccessReview's spec that describes the user."""


class ResourceAttributes(Protocol):
    """An action that the API server authorizes."""

    def to_review_attributes(self) -> dict[str, Any]:
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

    def to_review_attributes(self) -> dict[str, Any]:
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

    def to_review_attributes(self) -> dict[str, Any]:
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
        limiter = ReviewLimiter(wall_clock)
        self._users: ReviewCache[User] = ReviewCache(limiter, wall_clock)
        self._allowed: ReviewCache[bool] = ReviewCache(limiter, wall_clock)

    async def admit(self, authorization: str, attributes: ResourceAttributes, source: str) -> User:
        """Return the user if the action is allowed; `source` is the address of the client.

        Raises UnauthenticatedError, ForbiddenError, TooManyRequestsError and AuthenticationUnavailableError with a
        sentence.
        """
        user = await self._authenticate(authorization, source)
        if not await self.may(user, attributes, source, counts=True):
            raise ForbiddenError(f"{user.name} may not {attributes}")
        return user

    async def _authenticate(self, authorization: str, source: str) -> User:
        token = read_bearer_token(authorization)
        if not token:
            raise UnauthenticatedError("send a token of this cluster as `Authorization: Bearer <token>`")
        review = partial(self._review_token, token)
        user = await self._users.get(token, source, review, expires=_read_expiry(token))
        if user is None:
            raise UnauthenticatedError("the token is not valid (any more) for the API server of this cluster")
        return user

    async def may(self, user: User, attributes: ResourceAttributes, source: str, *, counts: bool = False) -> bool:
        """Return whether an admitted user may also do this.

        `counts`: whether a refusal counts as an invalid token does. Raises TooManyRequestsError and
        AuthenticationUnavailableError.
        """
        spec = {**user.spec, **attributes.to_review_attributes()}
        request, review = json.dumps(spec, sort_keys=True), partial(self._review_access, spec)
        return await self._allowed.get(request, source, review, counts_refusals=counts) or False

    async def _review_token(self, token: str) -> User | None:
        status = await self._tokens({"token": token})
        user = status.get("user") or {}
        name = user.get("username")
        if status.get("authenticated") is not True or not name:
            return None
        return User(name, {"user": name, **{key: user[key] for key in ("uid", "groups", "extra") if user.get(key)}})

    async def _review_access(self, spec: dict[str, Any]) -> bool | None:
        status = await self._rights(spec)
        return True if status.get("allowed") is True and status.get("denied") is not True else None


def _read_expiry(token: str) -> float:
    """Return the expiry that a token names, unverified; infinity if it names none."""
    try:
        return float(jwt.decode(token, options={"verify_signature": False})["exp"])
    except (jwt.PyJWTError, LookupError, TypeError, ValueError, OverflowError, RecursionError):
        return math.inf
