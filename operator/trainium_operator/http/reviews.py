"""Ask the API server about tokens and rights, and cache its answers.

Anybody who reaches a port can send tokens, and each costs the API server a review. So requests wait in queues: one for
each address and known holder (a worker, a user) that a token names, which costs nothing to read and proves nothing; one
for each address for all other tokens.

Guarantees:
- At most `AT_ONCE` reviews run at a time, of which anonymous clients have `ANONYMOUS_AT_ONCE`.
- Queues take turns, holders before anonymous clients, so nobody waits behind a flood.
- A client that was refused `MAX_REFUSALS` times within `WINDOW_SECONDS` gets no review until they are over.
- A token or right is known by its SHA-256 and reviewed once, however many requests wait for the answer.
- An accepted answer holds for `CACHE_SECONDS` and never past its expiry; while the API server does not answer, for
  `STALE_SECONDS`. A refusal holds for `REFUSAL_SECONDS`.
- Accepted answers and refusals have separate caches, so that no flood of refusals evicts an accepted one.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from trainium_operator.http.errors import FloodedError, ReviewUnavailableError
from trainium_operator.newest import Newest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

AT_ONCE = 16
ANONYMOUS_AT_ONCE = 4
MAX_WAITING_PER_CLIENT = 16
MAX_ANONYMOUS_WAITING = 1_024
MAX_REFUSALS = 10
WINDOW_SECONDS = 60.0
CACHE_SECONDS = 60.0
_RENEW_AFTER = tuple(CACHE_SECONDS * (0.5 + 0.4 * part / 16) for part in range(16))
"""Age from which on an answer is renewed while it is still used."""
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
class _Refused:
    since: float
    times: int


_Queue = OrderedDict[ClientKey, deque[asyncio.Future[None]]]


class TokenReviewQueue:
    """Runs reviews, a bounded number at a time, in turns by client."""

    def __init__(
        self, clock: Callable[[], float], *, at_once: int = AT_ONCE, anonymous_at_once: int = ANONYMOUS_AT_ONCE
    ) -> None:
        self._clock = clock
        self._at_once = at_once
        self._anonymous_at_once = anonymous_at_once
        self._holders: _Queue = OrderedDict()
        self._anonymous: _Queue = OrderedDict()
        self._waiting_anonymous = 0
        self._running = 0
        self._anonymous_running = 0
        self._refused: Newest[ClientKey, _Refused] = Newest(REFUSALS_REMEMBERED)

    async def ask(self, client: ClientKey, review: Callable[[], Awaitable[T]]) -> T:
        """Run the review in its turn. Raises FloodedError at once."""
        await self._wait_for_turn(client)
        try:
            self._reject_floods(client)  # others of this client were refused while it waited
            return await review()
        finally:
            self._running -= 1
            self._anonymous_running -= not client.holder
            self._start_next()

    def refused(self, client: ClientKey) -> None:
        """Count a token of this client that was not valid."""
        known, now = self._refused.get(client), self._clock()
        if known is None or now - known.since >= WINDOW_SECONDS:
            known = _Refused(now, 0)
        self._refused[client] = _Refused(known.since, known.times + 1)

    def _reject_floods(self, client: ClientKey, *, full: bool = False) -> None:
        known = self._refused.get(client)
        often = known is not None and known.times >= MAX_REFUSALS and self._clock() - known.since < WINDOW_SECONDS
        if full or often:
            raise FloodedError(f"too much that is not known comes from {client.source or 'this address'}")

    async def _wait_for_turn(self, client: ClientKey) -> None:
        queue = self._holders if client.holder else self._anonymous
        waiting = len(queue.get(client, ()))
        full = waiting >= MAX_WAITING_PER_CLIENT or (
            not client.holder and self._waiting_anonymous >= MAX_ANONYMOUS_WAITING
        )
        self._reject_floods(client, full=full)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.setdefault(client, deque()).append(turn)
        self._waiting_anonymous += not client.holder
        self._start_next()
        await turn

    def _start_next(self) -> None:
        while self._running < self._at_once and self._holders:
            self._start(self._holders)
        while self._running < self._at_once and self._anonymous_running < self._anonymous_at_once and self._anonymous:
            self._waiting_anonymous -= 1
            self._anonymous_running += self._start(self._anonymous)

    def _start(self, queue: _Queue) -> bool:
        """Start the next review; False when its client waits no more."""
        client, turns = queue.popitem(last=False)
        turn = turns.popleft()
        if turns:
            queue[client] = turns  # at the end: the others first
        if turn.done():
            return False
        self._running += 1
        turn.set_result(None)
        return True


@dataclass(frozen=True, slots=True)
class Accepted(Generic[T]):
    """An answer of yes; `expires` in Unix seconds."""

    value: T
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class ReviewRequest(Generic[T]):
    """A token or right to review: `ask` returns None for no, and raises ReviewUnavailableError."""

    digest: bytes
    client: Callable[[], ClientKey]
    """Only called when the API server has to be asked."""
    ask: Callable[[], Awaitable[Accepted[T] | None]]
    counts: bool = True
    """Whether a no counts against the client; not where a reader of a page is reviewed for a part of it."""


@dataclass(frozen=True, slots=True)
class _Remembered(Generic[T]):
    value: T
    reviewed: float
    expires: float


class ReviewCache(Generic[T]):
    """Caches the answers to requests of one kind; `wall_clock` in Unix seconds."""

    def __init__(
        self, queue: TokenReviewQueue, wall_clock: Callable[[], float], *, remembered: int = REMEMBERED
    ) -> None:
        """`remembered` bounds the accepted answers that are kept."""
        self._queue = queue
        self._wall_clock = wall_clock
        self._known: Newest[bytes, _Remembered[T]] = Newest(remembered)
        self._refused: Newest[bytes, float] = Newest(REFUSALS_REMEMBERED)
        """When the API server last refused it."""
        self._pending: dict[bytes, asyncio.Future[T | None]] = {}

    async def answer(self, request: ReviewRequest[T]) -> T | None:
        """Return the value, or None for no. Raises ReviewUnavailableError and FloodedError."""
        digest, now = request.digest, self._wall_clock()
        if now - self._refused.get(digest, -REFUSAL_SECONDS) < REFUSAL_SECONDS:
            return None
        known = self._known.get(digest)
        if known is None or now >= min(known.reviewed + CACHE_SECONDS, known.expires):
            return await self._await_review(request, known)
        self._known.move_to_end(digest)
        if now >= known.reviewed + _RENEW_AFTER[digest[0] % len(_RENEW_AFTER)]:
            # No request waits for a renewal; the jitter spreads those that came together.
            self._start_review(request)
        return known.value

    async def _await_review(self, request: ReviewRequest[T], known: _Remembered[T] | None) -> T | None:
        pending = self._start_review(request)
        try:
            return await asyncio.shield(pending)
        except (ReviewUnavailableError, FloodedError):
            now = self._wall_clock()
            if known is not None and now < min(known.reviewed + STALE_SECONDS, known.expires):
                # A restart of the API server must not refuse clients that were accepted.
                return known.value
            raise

    def _start_review(self, request: ReviewRequest[T]) -> asyncio.Future[T | None]:
        digest = request.digest
        pending = self._pending.get(digest)
        if pending is None:
            pending = asyncio.ensure_future(self._ask(request, request.client()))
            self._pending[digest] = pending
            pending.add_done_callback(lambda done: self._review_done(digest, done))
        return pending

    def _review_done(self, digest: bytes, done: asyncio.Future[T | None]) -> None:
        del self._pending[digest]
        if not done.cancelled():
            done.exception()  # retrieve it also when no request waits any more

    async def _ask(self, request: ReviewRequest[T], client: ClientKey) -> T | None:
        accepted = await self._queue.ask(client, request.ask)
        now, digest = self._wall_clock(), request.digest
        if accepted is None:
            self._known.pop(digest, None)
            self._refused[digest] = now
            if request.counts:
                self._queue.refused(client)
            return None
        # The API server has just accepted it, so an expiry in the past means that our clock is wrong.
        expires = math.inf if accepted.expires is None or accepted.expires <= now else accepted.expires
        self._refused.pop(digest, None)
        self._known[digest] = _Remembered(accepted.value, now, expires)
        return accepted.value
