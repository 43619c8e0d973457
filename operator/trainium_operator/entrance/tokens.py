"""Bearer tokens, as far as they can be read without asking anybody: nothing here is proof. Tokens are never logged."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

LONGEST_TOKEN = 8_000


def bearer_of(authorization: str) -> str:
    """The token of an `Authorization` header; empty when there is none that could be one."""
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and len(token) <= LONGEST_TOKEN else ""


def digest_of(token: str) -> bytes:
    """By which a token is remembered."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def claims_of(token: str) -> dict[str, Any]:
    """What a JWT says, which this does not check; nothing for a token of another form."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}


def expiry_of(token: str) -> float | None:
    """`exp` of a JWT, in Unix seconds; None for a token of another form."""
    found = claims_of(token).get("exp")
    try:
        return float(found) if isinstance(found, int | float) else None
    except OverflowError:
        return None
