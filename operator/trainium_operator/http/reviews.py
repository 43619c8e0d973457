"""Ask the API server about tokens and rights, and cache its answers.

Any client that reaches a port can send tokens, and each costs the API server a review. So requests wait in queues: one
for each address and known holder (a worker, a user) that a token names, unverified; and one for each address for all
other tokens.

Guarantees:
- At most `MAX_RUNNING` reviews run at a time, of which anonymous clients have `MAX_ANONYMOUS_RUNNING`.
- Queues take turns, holders before anonymous clients, so nobody waits behind a flood.
- A client that was refused `MAX_REFUSALS` times within `WINDOW_SECONDS` gets no review until that time has passed.
- A token or right is cached by its SHA-256 and reviewed once, however many requests wait for the answer.
- An accepted answer is valid for `CACHE_SECONDS` and never past its expiry; while the API server does not answer, for
  `STALE_SECONDS`. A refusal is valid for `REFUSAL_SECONDS`.
- Accepted answers and refusals have separate caches, so that no flood of refusals evicts an accepted one.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.http.errors import ReviewUnavailableError, TooManyRequestsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

MAX_RUNNING = 16
MAX_ANONYMOUS_RUNNING = 4
MAX_WAITING_PER_CLIENT = 16
MAX_ANONYMOUS_WAITING = 1_024
MAX_REFUSALS = 10
WINDOW_SECONDS = 60.0
CACHE_SECONDS = 60.0
_RENEW_AFTER = tuple(CACHE_SECONDS * (0.5 + 0.4 * part / 16) for part in range(16))
"""Age from which a used answer is renewed."""
REFUSAL_SECONDS = 5.0
STALE_SECONDS = 600.0
REMEMBERED = 20_000
REFUSALS_REMEMBERED = 4_096


@dataclass(frozen=True, slots=True)
class ClientKey:
    """Identifies the clients that share a queue."""

    source: str
    """The address that the token came from."""
    holder: str = ""
    """A known holder that the token names; empty for an anonymous client."""


@dataclass(frozen=True, slots=True)
class _RefusalCount:
    since: float
    count: int


_Queue = OrderedDict[ClientKey, deque[asyncio.Future[None]]]


class TokenReviewQueue:
    """Runs reviews, a bounded number at a time, in turns by client."""

    def __init__(
        self, clock: Callable[[], float], *, max_running: int = MAX_RUNNING, max_anonymous: int = MAX_ANONYMOUS_RUNNING
    ) -> None:
        self._clock = clock
        self._max_running = max_running
        self._max_anonymous = max_anonymous
        self._holders: _Queue = OrderedDict()
        self._anonymous: _Queue = OrderedDict()
        self._waiting_anonymous = 0
        self._running = 0
        self._anonymous_running = 0
        self._refused: BoundedDict[ClientKey, _RefusalCount] = BoundedDict(REFUSALS_REMEMBERED)

    async def run_review(self, client: ClientKey, review: Callable[[], Awaitable[T]]) -> T:
        """Run the review in its turn. Raises TooManyRequestsError at once if the queue is full or refusals are many."""
        await self._wait_for_turn(client)
        try:
            self._reject_floods(client)  # others of this client were refused while it waited
            return await review()
        finally:
            self._running -= 1
            self._anonymous_running -= not client.holder
            self._start_next()

    def count_refusal(self, client: ClientKey) -> None:
        """Count an invalid token of this client."""
        refusals, now = self._refused.get(client), self._clock()
        if refusals is None or now - refusals.since >= WINDOW_SECONDS:
            refusals = _RefusalCount(now, 0)
        self._refused[client] = _RefusalCount(refusals.since, refusals.count + 1)

    def _reject_floods(self, client: ClientKey, *, queue_is_full: bool = False) -> None:
        refusals = self._refused.get(client)
        refused_often = (
            refusals is not None and refusals.count >= MAX_REFUSALS and self._clock() - refusals.since < WINDOW_SECONDS
        )
        if queue_is_full or refused_often:
            raise TooManyRequestsError(f"too much that is not known comes from {client.source or 'this address'}")

    async def _wait_for_turn(self, client: ClientKey) -> None:
        queue = self._holders if client.holder else self._anonymous
        waiting = len(queue.get(client, ()))
        queue_is_full = waiting >= MAX_WAITING_PER_CLIENT or (
            not client.holder and self._waiting_anonymous >= MAX_ANONYMOUS_WAITING
        )
        self._reject_floods(client, queue_is_full=queue_is_full)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.setdefault(client, deque()).append(turn)
        self._waiting_anonymous += not client.holder
        self._start_next()
        await turn

    def _start_next(self) -> None:
        while self._running < self._max_running and self._holders:
            self._start(self._holders)
        while self._running < self._max_running and self._anonymous_running < self._max_anonymous and self._anonymous:
            self._waiting_anonymous -= 1
            self._anonymous_running += self._start(self._anonymous)

    def _start(self, queue: _Queue) -> bool:
        """Start the next review; return False when its client no longer waits."""
        client, turns = queue.popitem(last=False)
        turn = turns.popleft()
        if turns:
            queue[client] = turns  # at the end: other clients first
        if turn.done():
            return False
        self._running += 1
        turn.set_result(None)
        return True


@dataclass(frozen=True, slots=True)
class AcceptedReview(Generic[T]):
    """An accepted answer; `expires` in Unix seconds."""

    value: T
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class ReviewRequest(Generic[T]):
    """A token or right to review: `review` returns None for a refusal, and raises ReviewUnavailableError."""

    digest: bytes
    client: Callable[[], ClientKey]
    """Return its client; called only if the API server has to be asked."""
    review: Callable[[], Awaitable[AcceptedReview[T] | None]]
    counts_refusals: bool = True
    """Whether a refusal counts against the client; False for a reader's right to see a part of a page."""


@dataclass(frozen=True, slots=True)
class _CachedReview(Generic[T]):
    value: T
    reviewed: float
    expires: float


class ReviewCache(Generic[T]):
    """Caches the answers to requests of one kind; `wall_clock` in Unix seconds."""

    def __init__(
        self, queue: TokenReviewQueue, wall_clock: Callable[[], float], *, remembered: int = REMEMBERED
    ) -> None:
        """`remembered` limits the accepted answers that are cached."""
        self._queue = queue
        self._wall_clock = wall_clock
        self._accepted: BoundedDict[bytes, _CachedReview[T]] = BoundedDict(remembered)
        self._refused: BoundedDict[bytes, float] = BoundedDict(REFUSALS_REMEMBERED)
        """When the API server last refused it."""
        self._pending: dict[bytes, asyncio.Future[T | None]] = {}

    async def get(self, request: ReviewRequest[T]) -> T | None:
        """Return the cached or reviewed value; None if refused. Raises ReviewUnavailableError, TooManyRequestsError."""
        digest, now = request.digest, self._wall_clock()
        if now - self._refused.get(digest, -REFUSAL_SECONDS) < REFUSAL_SECONDS:
            return None
        cached = self._accepted.get(digest)
        if cached is None or now >= min(cached.reviewed + CACHE_SECONDS, cached.expires):
            return await self._await_review(request, cached)
        self._accepted.move_to_end(digest)
        if now >= cached.reviewed + _RENEW_AFTER[digest[0] % len(_RENEW_AFTER)]:
            # No request waits for a renewal; the jitter spreads answers that expire together.
            self._start_review(request)
        return cached.value

    async def _await_review(self, request: ReviewRequest[T], cached: _CachedReview[T] | None) -> T | None:
        pending = self._start_review(request)
        try:
            return await asyncio.shield(pending)
        except (ReviewUnavailableError, TooManyRequestsError):
            now = self._wall_clock()
            if cached is not None and now < min(cached.reviewed + STALE_SECONDS, cached.expires):
                # A restart of the API server must not reject clients that were accepted.
                return cached.value
            raise

    def _start_review(self, request: ReviewRequest[T]) -> asyncio.Future[T | None]:
        digest = request.digest
        pending = self._pending.get(digest)
        if pending is None:
            pending = asyncio.ensure_future(self._review(request, request.client()))
            self._pending[digest] = pending
            pending.add_done_callback(lambda done: self._review_done(digest, done))
        return pending

    def _review_done(self, digest: bytes, done: asyncio.Future[T | None]) -> None:
        del self._pending[digest]
        if not done.cancelled():
            done.exception()  # retrieve it even if no request waits any more

    async def _review(self, request: ReviewRequest[T], client: ClientKey) -> T | None:
        review = await self._queue.run_review(client, request.review)
        now, digest = self._wall_clock(), request.digest
        if review is None:
            self._accepted.pop(digest, None)
            self._refused[digest] = now
            if request.counts_refusals:
                self._queue.count_refusal(client)
            return None
        # The API server has just accepted it, so an expiry in the past means that this clock is wrong.
        expires = math.inf if review.expires is None or review.expires <= now else review.expires
        self._refused.pop(digest, None)
        self._accepted[digest] = _CachedReview(review.value, now, expires)
        return review.value
