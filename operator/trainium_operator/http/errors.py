"""Define why a client is refused; each message is a sentence for the client."""

from __future__ import annotations


class UnauthenticatedError(Exception):
    """401: no token, or an invalid one."""


class ForbiddenError(Exception):
    """403: a valid token, but its holder may not send or read this."""


class PodDeletedError(ForbiddenError):
    """410: a valid token, but its pod or job no longer exists."""


class TooManyRequestsError(Exception):
    """429: too many tokens or requests of this kind came from this address."""


class AuthenticationUnavailableError(Exception):
    """503: tokens or rights cannot be checked now."""
