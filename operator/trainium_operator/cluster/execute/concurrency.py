"""Limit how many writes of pods run at once, in total and for one job; wait for every write that was started.

Guarantees:
- At most `ALL` writes run together and `OF_ONE` for one job, so a slow job leaves capacity.
- A free slot goes to the job that holds fewest, so several slow jobs delay a quick one by one write.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trainium_operator.cluster.api.errors import ApiError
from trainium_operator.cluster.execute.deletion_limit import ForceDeleteLimitError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from trainium_operator.plan.model.names import JobId

OF_ONE = 64
ALL = 96
MORE_IN_FLIGHT = 3


class WriteSlots:
    """`async with slots.of(job)` around each write."""

    def __init__(self) -> None:
        self._held: Counter[JobId] = Counter()
        self._waiting: dict[JobId, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def of(self, job: JobId) -> AsyncIterator[None]:
        """Hold a slot for one write of this job."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job, deque()).append(turn)
        self._assign()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(job)
            raise
        try:
            yield
        finally:
            self._release(job)

    def _release(self, job: JobId) -> None:
        self._held[job] -= 1
        if not self._held[job]:
            del self._held[job]
        self._assign()

    def _assign(self) -> None:
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


async def run_all(calls: Iterable[Awaitable[None]]) -> None:
    """Run all to their end, then raise the first error, so that no write continues unobserved."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    # An error of another class is a defect, so it is raised before errors of the API server.
    for error in sorted(errors, key=lambda each: (isinstance(each, ApiError), isinstance(each, ForceDeleteLimitError))):
        raise error


async def run_growing(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run calls with growing concurrency while they succeed. After an error no call starts, and the error is raised."""
    waiting, errors, size = iter(calls), list[BaseException](), 1

    async def work(group: asyncio.TaskGroup) -> None:
        nonlocal size
        for call in waiting:
            try:
                await call()
            except Exception as error:  # noqa: BLE001 - raised below, when all started calls have ended
                errors.append(error)
            if errors:
                return
            more = min(MORE_IN_FLIGHT, OF_ONE - size)
            size += more
            for _ in range(more):
                group.create_task(work(group))

    async with asyncio.TaskGroup() as group:
        group.create_task(work(group))
    for error in sorted(errors, key=lambda each: isinstance(each, ApiError)):
        raise error
