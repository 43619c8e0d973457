"""Read bearer tokens without verifying them. Tokens are never logged."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

MAX_TOKEN_CHARACTERS = 8_000


def bearer_token(authorization: str) -> str:
    """Return the token of an `Authorization` header; empty when there is none."""
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and len(token) <= MAX_TOKEN_CHARACTERS else ""


def token_digest(token: str) -> bytes:
    """Return the key under which a token is cached."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def unverified_claims(token: str) -> dict[str, Any]:
    """Return the claims of a JWT, unverified; none for a token of another form."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}


def unverified_expiry(token: str) -> float | None:
    """Return `exp` of a JWT in Unix seconds, unverified; None for a token of another form."""
    found = unverified_claims(token).get("exp")
    try:
        return float(found) if isinstance(found, int | float) else None
    except OverflowError:
        return None
