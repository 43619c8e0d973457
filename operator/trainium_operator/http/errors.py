"""Why a client is refused; each message is a sentence that the client may read."""

from __future__ import annotations


class UnauthenticatedError(Exception):
    """401: no token, or not a valid one for us."""


class RefusedError(Exception):
    """403: a valid token, but its holder may not send or read this."""


class GoneError(RefusedError):
    """410: a valid token, but what its holder belongs to no longer exists."""


class FloodedError(Exception):
    """429: too many tokens or requests of this kind came from this address."""


class ReviewUnavailableError(Exception):
    """503: the API server could not answer."""
