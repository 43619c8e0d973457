"""Who asks, and what they may see: the API server's own authentication and authorisation.

Invariants: a token counts for what a TokenReview says of it (for the API server's audience), a deed for what a
SubjectAccessReview of that user says; how long: `entrance/reviews.py`. Only who was allowed something is known: a valid
token alone, which every pod has, moves nobody ahead. Tokens are never logged.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trainium_operator.entrance.errors import RefusedError, UnauthenticatedError
from trainium_operator.entrance.review_desk import Lane, ReviewDesk
from trainium_operator.entrance.reviews import Question, Reviews, Yes
from trainium_operator.entrance.tokens import bearer_of, claims_of, digest_of, expiry_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Review = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

AT_ONCE = 8
STRANGERS_AT_ONCE = 2
"""Reviews under way; fewer than of agents, whose training waits."""
REMEMBERED = 1_024
"""Tokens, rights and users, each; a tenant has as many tokens as it asks for."""


@dataclass(frozen=True, slots=True)
class User:
    """Somebody, as a TokenReview describes them."""

    name: str
    uid: str
    groups: tuple[str, ...]
    extra: tuple[tuple[str, tuple[str, ...]], ...]


class Deed(Protocol):
    """Something that the API server lets somebody do, or not."""

    def attributes(self) -> dict[str, Any]:
        """The part of a SubjectAccessReview's spec that says what is asked for."""
        ...

    def __str__(self) -> str:
        """After `may not`."""
        ...


@dataclass(frozen=True, slots=True)
class ReadPath:
    """Reading a path of ours."""

    path: str
    verb: str = "get"

    def attributes(self) -> dict[str, Any]:
        """See Deed."""
        return {"nonResourceAttributes": {"path": self.path, "verb": self.verb}}

    def __str__(self) -> str:
        return f"{self.verb} the nonResourceURL {self.path}"


@dataclass(frozen=True, slots=True)
class ReadObjects:
    """Reading what the API server holds: `get` with a name, `list` without one; no namespace: of all."""

    resource: str
    namespace: str
    name: str = ""
    group: str = ""

    @property
    def verb(self) -> str:
        """As kubectl would need it."""
        return "get" if self.name else "list"

    def attributes(self) -> dict[str, Any]:
        """See Deed."""
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
    """Both reviewers post the `spec` of their kind and answer its `status`. They raise ReviewUnavailableError."""

    def __init__(self, tokens: Review, rights: Review, *, wall_clock: Callable[[], float]) -> None:
        self._tokens = tokens
        self._rights = rights
        desk = ReviewDesk(wall_clock, at_once=AT_ONCE, strangers_at_once=STRANGERS_AT_ONCE)
        self._users: Reviews[User] = Reviews(desk, wall_clock, remembered=REMEMBERED)
        self._allowed: Reviews[bool] = Reviews(desk, wall_clock, remembered=REMEMBERED)
        self._known: OrderedDict[str, None] = OrderedDict()
        """Names of users who were allowed something."""

    async def admit(self, authorization: str, deed: Deed, source: str) -> User:
        """The user who may do this. `source` is the address that the request came from.

        Raises UnauthenticatedError, RefusedError, FloodedError and ReviewUnavailableError, each with a sentence.
        """
        user = await self._user(authorization, source)
        if not await self.may(user, deed, source, counts=True):
            raise RefusedError(f"{user.name} may not {deed}")
        self._known[user.name] = None
        self._known.move_to_end(user.name)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return user

    async def _user(self, authorization: str, source: str) -> User:
        token = bearer_of(authorization)
        if not token:
            raise UnauthenticatedError("send a token of this cluster as `Authorization: Bearer <token>`")
        lane = partial(self._lane_of_token, token, source)
        user = await self._users.answer(Question(digest_of(token), lane, partial(self._ask_who, token)))
        if user is None:
            raise UnauthenticatedError("the token is not valid (any more) for the API server of this cluster")
        return user

    async def may(self, user: User, deed: Deed, source: str, *, counts: bool = False) -> bool:
        """Whether somebody who was admitted may do this too; a no `counts` like a bad token.

        Raises FloodedError and ReviewUnavailableError.
        """
        spec = _spec(user, deed)
        digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).digest()
        question = Question(digest, partial(self._lane, user.name, source), partial(self._ask_whether, spec), counts)
        return await self._allowed.answer(question) or False

    def _lane_of_token(self, token: str, source: str) -> Lane:
        """By what the token says of itself, which nobody has checked yet: it decides on the order alone."""
        subject = claims_of(token).get("sub")
        return self._lane(subject if isinstance(subject, str) else "", source)

    def _lane(self, name: str, source: str) -> Lane:
        return Lane(source, name if name in self._known else "")

    async def _ask_who(self, token: str) -> Yes[User] | None:
        user = _user_of(await self._tokens({"token": token}))
        return Yes(user, expiry_of(token)) if user is not None else None

    async def _ask_whether(self, spec: dict[str, Any]) -> Yes[bool] | None:
        status = await self._rights(spec)
        return Yes(value=True) if status.get("allowed") is True and status.get("denied") is not True else None


def _spec(user: User, deed: Deed) -> dict[str, Any]:
    return {
        "user": user.name,
        "uid": user.uid,
        "groups": list(user.groups),
        "extra": {key: list(values) for key, values in user.extra},
        **deed.attributes(),
    }


def _user_of(status: Mapping[str, Any]) -> User | None:
    """The user in a TokenReview's status; None when the token is not valid."""
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
