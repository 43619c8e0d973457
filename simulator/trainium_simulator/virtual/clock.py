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
        self._pending: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Add an event at a time, or now when that has passed."""
        heapq.heappush(self._pending, (max(when, self.now), next(self._numbers), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Add an event after so many seconds."""
        self.at(self.now + seconds, what)

    def advance(self, until: float) -> bool:
        """Advance to the next event and run all events of that time; False when it is after `until`."""
        if not self._pending or self._pending[0][0] > until:
            self.now = until
            return False
        self.now = self._pending[0][0]
        while self._pending and self._pending[0][0] <= self.now:
            heapq.heappop(self._pending)[2]()
        return True
