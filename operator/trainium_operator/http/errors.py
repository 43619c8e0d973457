"""Define why a client is refused; each message is a sentence for the client."""

from __future__ import annotations

from typing import ClassVar


class RefusedError(Exception):
    """A message or a request is refused, with this status of HTTP."""

    status: ClassVar[int]


class UnauthenticatedError(RefusedError):
    """No token, or an invalid one."""

    status = 401


class ForbiddenError(RefusedError):
    """A valid token, but its holder may not send or read this."""

    status = 403


class PodDeletedError(ForbiddenError):
    """A valid token, but its pod or job no longer exists."""

    status = 410


class TooManyRequestsError(RefusedError):
    """Too many tokens or requests of this kind came from this address."""

    status = 429


class AuthenticationUnavailableError(RefusedError):
    """Tokens or rights cannot be checked now."""

    status = 503

    def __init__(self) -> None:
        super().__init__("the operator cannot check tokens now; try again")
