"""How many writes of pods are under way at once, of all jobs and of one.

Invariants: at most `ALL` together and `OF_ONE` for one job, so one that is slow leaves room; a place that comes free
goes to the job that holds fewest, so that of several slow ones none keeps a quick one waiting for more than one write.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trainium_operator.plan.model.names import JobId

OF_ONE = 64
ALL = 96


class Slots:
    """`async with slots.of(job)` around each write."""

    def __init__(self) -> None:
        self._held: Counter[JobId] = Counter()
        self._waiting: dict[JobId, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def of(self, job: JobId) -> AsyncIterator[None]:
        """Hold a place for one write of this job."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job, deque()).append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._take_back(job)
            raise
        try:
            yield
        finally:
            self._take_back(job)

    def _take_back(self, job: JobId) -> None:
        self._held[job] -= 1
        if not self._held[job]:
            del self._held[job]
        self._give()

    def _give(self) -> None:
        while self._held.total() < ALL:
            ready = [job for job in self._waiting if self._held[job] < OF_ONE]
            if not ready:
                return
            job = min(ready, key=lambda each: self._held[each])
            turns = self._waiting[job]
            turn = turns.popleft()
            if not turns:
                del self._waiting[job]
            if not turn.done():
                self._held[job] += 1
                turn.set_result(None)
