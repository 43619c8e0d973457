"""Read bearer tokens. They are never logged."""

from __future__ import annotations

MAX_TOKEN_CHARACTERS = 8_000


def read_bearer_token(authorization: str) -> str:
    """Return the token of an `Authorization` header; empty when there is none."""
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and len(token) <= MAX_TOKEN_CHARACTERS else ""
