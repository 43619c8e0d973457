"""Decide how soon a job is planned after a change.

Invariants: the first change after a quiet while is planned at once, so a fault never waits; while changes come in
numbers (a thousand workers start, register, begin to train) a job is planned at most so often that planning takes
`SHARE` of the time, or `UNHURRIED_SHARE` where nothing hangs on them; and the last change is never missed. What a plan
costs is measured, so small jobs are planned after each change.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_operator.cluster.cache.store import Key
    from trainium_operator.cluster.queue.work_queue import WorkQueue

SHARE = 0.2
LONGEST_PAUSE = 1.0
UNHURRIED_SHARE = 0.05
LONGEST_UNHURRIED_PAUSE = 5.0
"""While thousands of pods start, each plan of them all would only count a few more."""


class Pace:
    """Puts keys into a queue, gathering what comes in quick succession."""

    def __init__(self, queue: WorkQueue[Key]) -> None:
        self._queue = queue
        self._next: dict[Key, float] = {}
        self._next_unhurried: dict[Key, float] = {}

    def put(self, key: Key, *, hurry: bool = True) -> None:
        """Have the job planned: now, or as soon as its pace allows; without `hurry` after a longer pause."""
        is_pending = (self._next if hurry else self._next_unhurried).get(key, 0.0)
        self._queue.put_after(key, is_pending - asyncio.get_running_loop().time())

    def planned(self, key: Key, spent: float, ended: float) -> None:
        """Record a plan that took until `ended` (loop time) and `spent` seconds itself."""
        self._next[key] = ended + min(LONGEST_PAUSE, spent * (1.0 / SHARE - 1.0))
        self._next_unhurried[key] = ended + min(LONGEST_UNHURRIED_PAUSE, spent * (1.0 / UNHURRIED_SHARE - 1.0))

    def forget(self, key: Key) -> None:
        """Forget a deleted job."""
        self._next.pop(key, None)
        self._next_unhurried.pop(key, None)
