"""Limit how many writes of pods run at once, in total and for one job; wait for every write that was started.

Guarantees:
- At most `MAX_WRITES` writes run together and `MAX_WRITES_PER_JOB` for one job, so a slow job leaves capacity.
- A free slot goes to the job that holds fewest, so several slow jobs delay a quick one by one write.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import ApiError
from trainium_operator.cluster.execute.deletion_limit import ForceDeleteLimitError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from trainium_operator.plan.model.names import JobId

MAX_WRITES_PER_JOB = 64
MAX_WRITES = 96
CALLS_PER_SUCCESS = 3
"""Further calls that `run_with_slow_start` starts after each success."""


class WriteSlots:
    """`async with slots.acquire(job)` around each write."""

    def __init__(self) -> None:
        self._held: Counter[JobId] = Counter()
        self._waiting: dict[JobId, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def acquire(self, job: JobId) -> AsyncIterator[None]:
        """Hold a slot for one write of this job."""
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job, deque()).append(slot)
        self._assign()
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
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
        while self._held.total() < MAX_WRITES:
            eligible = [job for job in self._waiting if self._held[job] < MAX_WRITES_PER_JOB]
            if not eligible:
                return
            job = min(eligible, key=lambda job: self._held[job])
            waiting = self._waiting[job]
            slot = waiting.popleft()
            if not waiting:
                del self._waiting[job]
            if not slot.done():
                self._held[job] += 1
                slot.set_result(None)


async def run_all(calls: Iterable[Awaitable[None]]) -> None:
    """Run all to their end, then raise the first error, so that no write continues unobserved."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    # An error of another class is a defect, so it is raised before errors of the API server.
    for error in sorted(
        errors, key=lambda error: (isinstance(error, ApiError), isinstance(error, ForceDeleteLimitError))
    ):
        raise error


async def run_with_slow_start(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
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
            added = min(CALLS_PER_SUCCESS, MAX_WRITES_PER_JOB - size)
            size += added
            for _ in range(added):
                group.create_task(work(group))

    async with asyncio.TaskGroup() as group:
        group.create_task(work(group))
    for error in sorted(errors, key=lambda error: isinstance(error, ApiError)):
        raise error
