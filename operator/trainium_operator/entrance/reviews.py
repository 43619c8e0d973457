"""What the API server said about tokens and rights, remembered for a while.

Invariants: a thing is known by its SHA-256; it is asked about once, however many wait for the answer, and only in its
turn (`ReviewDesk`); a yes counts for `CACHE_SECONDS` and never past its expiry, and only while the API server does not
answer for `STALE_SECONDS`; a no counts for `REFUSAL_SECONDS`. The two are kept apart, so that no flood of refusals
drives out what is known to be good.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from trainium_operator.entrance.errors import FloodedError, ReviewUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trainium_operator.entrance.review_desk import Lane, ReviewDesk

T = TypeVar("T")
_V = TypeVar("_V")

CACHE_SECONDS = 60.0
_RENEW_AFTER = tuple(CACHE_SECONDS * (0.5 + 0.4 * part / 16) for part in range(16))
"""Age from which on an answer is renewed while it is still used."""
REFUSAL_SECONDS = 5.0
STALE_SECONDS = 600.0
REMEMBERED = 20_000
REFUSALS_REMEMBERED = 4_096


@dataclass(frozen=True, slots=True)
class Yes(Generic[T]):
    """The API server accepts it; `expires` in Unix seconds."""

    value: T
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A thing to ask about: `ask` answers None for no, and raises ReviewUnavailableError."""

    digest: bytes
    lane: Callable[[], Lane]
    """Who asks; only called when the API server has to be asked."""
    ask: Callable[[], Awaitable[Yes[T] | None]]
    counts: bool = True
    """Whether a no speaks against who asks; not where somebody who may see a page is asked about a part of it."""


@dataclass(frozen=True, slots=True)
class _Remembered(Generic[T]):
    value: T
    reviewed: float
    expires: float | None


class Reviews(Generic[T]):
    """Answers to questions of one kind; `wall_clock` in Unix seconds."""

    def __init__(self, desk: ReviewDesk, wall_clock: Callable[[], float], *, remembered: int = REMEMBERED) -> None:
        """`remembered`: how many answers of yes."""
        self._remembered = remembered
        self._desk = desk
        self._wall_clock = wall_clock
        self._known: OrderedDict[bytes, _Remembered[T]] = OrderedDict()
        self._refused: OrderedDict[bytes, float] = OrderedDict()
        """When the API server last said no."""
        self._under_way: dict[bytes, asyncio.Future[T | None]] = {}

    async def answer(self, question: Question[T]) -> T | None:
        """None for no. Raises ReviewUnavailableError and FloodedError."""
        digest, now = question.digest, self._wall_clock()
        if now - self._refused.get(digest, -REFUSAL_SECONDS) < REFUSAL_SECONDS:
            return None
        known = self._known.get(digest)
        if known is None or not _is_fresh(known, now):
            return await self._reviewed(question, known)
        self._known.move_to_end(digest)
        if now >= known.reviewed + _RENEW_AFTER[digest[0] % len(_RENEW_AFTER)]:
            # Nobody waits for an answer that is only renewed; who came together is asked about apart.
            self._begin(question)
        return known.value

    async def _reviewed(self, question: Question[T], known: _Remembered[T] | None) -> T | None:
        under_way = self._begin(question)
        try:
            return await asyncio.shield(under_way)
        except (ReviewUnavailableError, FloodedError):
            now = self._wall_clock()
            usable = known is not None and now - known.reviewed < STALE_SECONDS
            if known is not None and usable and (known.expires is None or now < known.expires):
                # Nothing that went well must stop because the API server restarts.
                return known.value
            raise

    def _begin(self, question: Question[T]) -> asyncio.Future[T | None]:
        digest = question.digest
        under_way = self._under_way.get(digest)
        if under_way is None:
            under_way = asyncio.ensure_future(self._ask(question, question.lane()))
            self._under_way[digest] = under_way
            under_way.add_done_callback(lambda done: self._answered(digest, done))
        return under_way

    def _answered(self, digest: bytes, done: asyncio.Future[T | None]) -> None:
        del self._under_way[digest]
        if not done.cancelled():
            done.exception()  # also when all who waited for it have gone: nobody else will look

    async def _ask(self, question: Question[T], lane: Lane) -> T | None:
        said = await self._desk.ask(lane, question.ask)
        now, digest = self._wall_clock(), question.digest
        if said is None:
            self._known.pop(digest, None)
            _remember(self._refused, digest, now, REFUSALS_REMEMBERED)
            if question.counts:
                self._desk.refused(lane)
            return None
        # An expiry that is over: the API server has just accepted it, so it is our clock that is wrong.
        expires = None if said.expires is not None and said.expires <= now else said.expires
        self._refused.pop(digest, None)
        _remember(self._known, digest, _Remembered(said.value, now, expires), self._remembered)
        return said.value


def _remember(among: OrderedDict[bytes, _V], digest: bytes, value: _V, most: int) -> None:
    among[digest] = value
    among.move_to_end(digest)
    while len(among) > most:
        among.popitem(last=False)


def _is_fresh(known: _Remembered[T], now: float) -> bool:
    return now - known.reviewed < CACHE_SECONDS and (known.expires is None or now < known.expires)
