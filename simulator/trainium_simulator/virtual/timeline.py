"""Virtual time: what is to happen, in order.

Invariant: time never goes back, and what is due together keeps its order.
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
    """A clock that jumps to the next thing that happens."""

    def __init__(self) -> None:
        self.now = EPOCH
        self._pending: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Let it happen then, or now when that has passed."""
        heapq.heappush(self._pending, (max(when, self.now), next(self._numbers), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Let it happen in so many seconds."""
        self.at(self.now + seconds, what)

    def advance(self, until: float) -> bool:
        """Go to the next moment at which something is due, and let it happen; False when that is after `until`."""
        if not self._pending or self._pending[0][0] > until:
            self.now = until
            return False
        self.now = self._pending[0][0]
        while self._pending and self._pending[0][0] <= self.now:
            heapq.heappop(self._pending)[2]()
        return True
