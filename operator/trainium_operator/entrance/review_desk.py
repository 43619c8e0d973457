"""What the API server is asked about next, and what it is not asked about at all.

Anybody who reaches a port can send tokens, and each costs the API server a TokenReview. So reviews stand in lanes:
one per address and known holder (a worker, a user) that a token says it belongs to, which costs nothing to read and
proves nothing; one per address for all other tokens.
Invariants: at most `AT_ONCE` reviews are under way, of which strangers have `STRANGERS_AT_ONCE`; lanes take turns,
holders before strangers, so nobody waits behind a flood; a lane that was refused `MOST_REFUSALS` times within
`WINDOW_SECONDS` is asked about no more until they are over; everything that is kept is bounded.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from trainium_operator.entrance.errors import FloodedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

AT_ONCE = 16
STRANGERS_AT_ONCE = 4
MOST_WAITING_IN_LANE = 16
MOST_STRANGERS_WAITING = 1_024
MOST_REFUSALS = 10
WINDOW_SECONDS = 60.0
REMEMBERED = 4_096


@dataclass(frozen=True, slots=True)
class Lane:
    """Who is answered in turn with whom."""

    source: str
    """The address that the token came from."""
    holder: str = ""
    """Somebody who is known, and whom the token says it belongs to; empty for a stranger."""


@dataclass(frozen=True, slots=True)
class _Refused:
    since: float
    times: int


_Queue = OrderedDict[Lane, deque[asyncio.Future[None]]]


class ReviewDesk:
    """`ask` runs a review in its turn; `refused` tells that its token was not valid."""

    def __init__(
        self, clock: Callable[[], float], *, at_once: int = AT_ONCE, strangers_at_once: int = STRANGERS_AT_ONCE
    ) -> None:
        self._clock = clock
        self._at_once = at_once
        self._strangers_at_once = strangers_at_once
        self._holders: _Queue = OrderedDict()
        self._strangers: _Queue = OrderedDict()
        self._waiting_strangers = 0
        self._in_hand = 0
        self._strangers_in_hand = 0
        self._refused: OrderedDict[Lane, _Refused] = OrderedDict()

    async def ask(self, lane: Lane, review: Callable[[], Awaitable[T]]) -> T:
        """The review's answer. Raises FloodedError, at once."""
        await self._turn(lane)
        try:
            self._keep_out_floods(lane)  # by those that were refused while it waited
            return await review()
        finally:
            self._in_hand -= 1
            self._strangers_in_hand -= not lane.holder
            self._call_next()

    def refused(self, lane: Lane) -> None:
        """A token of this lane was not valid."""
        known, now = self._refused.pop(lane, None), self._clock()
        if known is None or now - known.since >= WINDOW_SECONDS:
            known = _Refused(now, 0)
        self._refused[lane] = _Refused(known.since, known.times + 1)
        while len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)

    def _keep_out_floods(self, lane: Lane, *, full: bool = False) -> None:
        known = self._refused.get(lane)
        often = known is not None and known.times >= MOST_REFUSALS and self._clock() - known.since < WINDOW_SECONDS
        if full or often:
            raise FloodedError(f"too much that is not known comes from {lane.source or 'this address'}")

    async def _turn(self, lane: Lane) -> None:
        queue = self._holders if lane.holder else self._strangers
        waiting = len(queue.get(lane, ()))
        full = waiting >= MOST_WAITING_IN_LANE or (
            not lane.holder and self._waiting_strangers >= MOST_STRANGERS_WAITING
        )
        self._keep_out_floods(lane, full=full)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.setdefault(lane, deque()).append(turn)
        self._waiting_strangers += not lane.holder
        self._call_next()
        await turn

    def _call_next(self) -> None:
        while self._in_hand < self._at_once and self._holders:
            self._call(self._holders)
        while self._in_hand < self._at_once and self._strangers_in_hand < self._strangers_at_once and self._strangers:
            self._waiting_strangers -= 1
            self._strangers_in_hand += self._call(self._strangers)

    def _call(self, queue: _Queue) -> bool:
        """Give the next one its turn; False when it waits no more."""
        lane, turns = queue.popitem(last=False)
        turn = turns.popleft()
        if turns:
            queue[lane] = turns  # at the end: the others first
        if turn.done():
            return False
        self._in_hand += 1
        turn.set_result(None)
        return True
