"""Why somebody is not let in; each message is a sentence that the caller may read."""

from __future__ import annotations


class UnauthenticatedError(Exception):
    """401: no token, or not a valid one for us."""


class RefusedError(Exception):
    """403: a valid token, but of somebody who may not say or see this."""


class FloodedError(Exception):
    """429: too many tokens or questions of this kind came from this address."""


class ReviewUnavailableError(Exception):
    """503: the API server could not tell."""
