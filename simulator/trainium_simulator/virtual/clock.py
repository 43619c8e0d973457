"""Run events in virtual time.

Guarantees:
- Time never goes back.
- Events of the same time run in the order in which they were added.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH = 1_800_000_000.0
"""Unix seconds at which each simulated job is created."""


class EventClock:
    """A clock that advances to the next event."""

    def __init__(self) -> None:
        self.now = EPOCH
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Call `callback` at a time in Unix seconds, or now if that has passed."""
        heapq.heappush(self._events, (max(when, self.now), next(self._sequence), callback))

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` after a delay in seconds."""
        self.call_at(self.now + seconds, callback)

    def advance(self, until: float) -> bool:
        """Advance to the next event and run all events of that time; return False if it is after `until`."""
        if not self._events or self._events[0][0] > until:
            self.now = until
            return False
        self.now = self._events[0][0]
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
        return True
