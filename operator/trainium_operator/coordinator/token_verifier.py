"""Verify ServiceAccount tokens with the public keys of the cluster, so that no token costs the API server a request.

Guarantees:
- A token counts if a published key signed it with the key's own asymmetric algorithm, and its issuer, audience and
  times are right. `none` and HMAC never count.
- Keys are read at start, every `REFRESH_SECONDS`, and when a token names an unknown key or issuer, but never twice
  within `PAUSE_SECONDS`, whatever clients send. A key that is no longer published is no longer valid.
- Keys stay valid while the API server is away. Tokens of a known key never wait for it.
- Tokens are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import jwt

from trainium_contract.wire.worker_env import TOKEN_AUDIENCE
from trainium_operator.http.errors import AuthenticationUnavailableError, UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "ES256", "ES384", "ES512"})
REFRESH_SECONDS = 300.0
PAUSE_SECONDS = 10.0
LEEWAY_SECONDS = 60.0
"""Error of the operator's clock that is accepted; the API server accepts as much."""
_CLAIMS = ("iss", "aud", "exp", "iat", "sub")


class KeysUnavailableError(Exception):
    """The keys cannot be read; the message has the remedy."""


class _UnknownKeyError(jwt.InvalidTokenError):
    """The token names no published key."""


_NEWER_KEYS_MAY_HELP = (_UnknownKeyError, jwt.InvalidIssuerError)


class TokenVerifier:
    """Verifies tokens for the coordinator's audience; `run` keeps the keys current.

    `read` returns the issuer and the JSON Web Key Set of the cluster, or raises KeysUnavailableError.
    """

    def __init__(self, read: Callable[[], Awaitable[tuple[str, dict[str, Any]]]]) -> None:
        self.problem = "the keys of ServiceAccount tokens are not read yet"
        """Why the newest keys are not known; empty if they are."""
        self._read = read
        self._keys: dict[str, jwt.PyJWK] = {}
        self._issuers: set[str] = set()
        """All since this process started: after a change, tokens of the previous one are valid until they expire."""
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()

    @property
    def has_keys(self) -> bool:
        """Whether keys were read, however long ago."""
        return bool(self._keys)

    async def run(self) -> None:
        """Read the keys again and again, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(PAUSE_SECONDS if self.problem else REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Read the keys, unless that was tried within `PAUSE_SECONDS`; concurrent callers share one request."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._read_at < PAUSE_SECONDS:
                return
            try:
                issuer, keys = await self._read()
                self._keys = _parse_keys(keys)
            except KeysUnavailableError as error:
                if str(error) != self.problem:
                    logger.warning("%s", error)
                self.problem = str(error)
            else:
                self._issuers.add(issuer)
                self.problem = ""
            finally:
                self._read_at = asyncio.get_running_loop().time()

    async def verify(self, token: str) -> dict[str, Any]:
        """Return the claims of a valid token. Raises UnauthenticatedError and AuthenticationUnavailableError."""
        try:
            try:
                return self._decode(token)
            except _NEWER_KEYS_MAY_HELP:
                await self.refresh()
                return self._decode(token)
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            if self.problem and isinstance(error, _NEWER_KEYS_MAY_HELP):
                raise AuthenticationUnavailableError from None
            sentence = f"the token is not valid (any more) for audience {TOKEN_AUDIENCE}: {error}"
            raise UnauthenticatedError(sentence) from None

    def _decode(self, token: str) -> dict[str, Any]:
        key = self._keys.get(jwt.get_unverified_header(token).get("kid", ""))
        if key is None:
            raise _UnknownKeyError("no published key has signed it")
        return jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            audience=TOKEN_AUDIENCE,
            issuer=self._issuers,
            leeway=LEEWAY_SECONDS,
            options={"require": list(_CLAIMS)},
        )


def _parse_keys(key_set: dict[str, Any]) -> dict[str, jwt.PyJWK]:
    """Return the usable keys by id. Raises KeysUnavailableError if there is none."""
    with contextlib.suppress(jwt.PyJWTError):
        keys = {key.key_id: key for key in jwt.PyJWKSet.from_dict(key_set) if key.algorithm_name in ALGORITHMS}
        if usable := {name: key for name, key in keys.items() if name}:
            return usable
    raise KeysUnavailableError("the API server publishes no usable key of ServiceAccount tokens")
