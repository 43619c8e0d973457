"""Ask the API server about tokens and rights of readers, and cache what it accepts.

Any client that reaches the port can send tokens, and each costs the API server a review.

Guarantees:
- At most `MAX_RUNNING` reviews run at a time, `MAX_PER_ADDRESS` of them for one address, so that no flood of one
  address delays others.
- An address that was refused `MAX_REFUSALS` times within `WINDOW_SECONDS` gets no review until that time has passed.
- An accepted answer is valid for `CACHE_SECONDS` and never past its expiry; while the API server does not answer, for
  `STALE_SECONDS`. It is cached by the SHA-256 of the token or right, and reviewed once for all requests that wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakValueDictionary

from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.http.errors import AuthenticationUnavailableError, TooManyRequestsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

T = TypeVar("T")

MAX_RUNNING = 8
MAX_PER_ADDRESS = 2
MAX_REFUSALS = 10
WINDOW_SECONDS = 60.0
CACHE_SECONDS = 60.0
STALE_SECONDS = 600.0
REMEMBERED = 1_024
"""Maximum number of accepted answers of a kind, and of addresses; a tenant can request any number of tokens."""


class ReviewLimiter:
    """Bounds concurrent reviews and counts refusals."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._by_address: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._refusals: BoundedDict[str, tuple[float, int]] = BoundedDict(REMEMBERED)
        """Start of the window and number of refusals in it, by address."""

    @asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Wait for the turn of this address."""
        turns = self._by_address.get(address) or asyncio.Semaphore(MAX_PER_ADDRESS)
        self._by_address[address] = turns
        async with turns, self._running:
            yield

    def reject_flood(self, address: str) -> None:
        """Raise TooManyRequestsError if the address was refused too often."""
        since, refusals = self._refusals.get(address, (-math.inf, 0))
        if refusals >= MAX_REFUSALS and self._clock() - since < WINDOW_SECONDS:
            raise TooManyRequestsError(
                f"too much that is not known comes from {address or 'this address'}; try again in a minute"
            )

    def count_refusal(self, address: str) -> None:
        """Count an invalid token of this address."""
        now = self._clock()
        since, refusals = self._refusals.get(address, (now, 0))
        self._refusals[address] = (since, refusals + 1) if now - since < WINDOW_SECONDS else (now, 1)


@dataclass(frozen=True, slots=True)
class _AcceptedReview(Generic[T]):
    """An accepted answer; times in Unix seconds."""

    value: T
    reviewed: float
    expires: float

    def is_valid(self, now: float, seconds: float) -> bool:
        """Return whether it counts for so many seconds after the review."""
        # The API server has accepted it, so an expiry before the review means that this clock is wrong.
        return now < self.reviewed + seconds and not self.reviewed < self.expires <= now


class ReviewCache(Generic[T]):
    """Caches the answers to requests of one kind; `wall_clock` in Unix seconds."""

    def __init__(self, limiter: ReviewLimiter, wall_clock: Callable[[], float]) -> None:
        self._limiter = limiter
        self._wall_clock = wall_clock
        self._accepted: BoundedDict[bytes, _AcceptedReview[T]] = BoundedDict(REMEMBERED)
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Locks of the requests that wait for a review, so that all of them get one answer."""

    async def get(
        self,
        request: str,
        address: str,
        review: Callable[[], Awaitable[T | None]],
        *,
        expires: float = math.inf,
        counts_refusals: bool = True,
    ) -> T | None:
        """Return the cached or reviewed value of the token or right; None if refused.

        `expires` in Unix seconds; `counts_refusals`: whether a refusal counts against the address. Raises
        AuthenticationUnavailableError and TooManyRequestsError.
        """
        digest = hashlib.sha256(request.encode(errors="surrogateescape")).digest()
        if (cached := self._find(digest, CACHE_SECONDS)) is not None:
            return cached
        lock = self._locks.get(digest) or asyncio.Lock()
        self._locks[digest] = lock
        async with lock, self._limiter.turn(address):
            if (cached := self._find(digest, CACHE_SECONDS)) is not None:  # reviewed meanwhile
                return cached
            try:
                self._limiter.reject_flood(address)
                value = await review()
            except (AuthenticationUnavailableError, TooManyRequestsError):
                # A restart of the API server must not reject clients that were accepted.
                if (cached := self._find(digest, STALE_SECONDS)) is not None:
                    return cached
                raise
            if value is not None:
                self._accepted[digest] = _AcceptedReview(value, self._wall_clock(), expires)
            else:
                self._accepted.pop(digest, None)
                if counts_refusals:
                    self._limiter.count_refusal(address)
            return value

    def _find(self, digest: bytes, seconds: float) -> T | None:
        cached = self._accepted.get(digest)
        if cached is None or not cached.is_valid(self._wall_clock(), seconds):
            return None
        self._accepted.move_to_end(digest)
        return cached.value
