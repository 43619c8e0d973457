"""Writes side by side: all at once, or more and more of them; none is left running unseen."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from trainium_operator.cluster.api.errors import ApiError
from trainium_operator.cluster.execute.deletion_limit import HeldBackError
from trainium_operator.cluster.execute.write_slots import OF_ONE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

MORE_IN_FLIGHT = 3


async def all_of(calls: Iterable[Awaitable[None]]) -> None:
    """Run all, to their end, then raise the first error: a failed one must not leave others running unseen."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    # An error that is not the API server's is a defect, which must not hide behind one that is.
    for error in sorted(errors, key=lambda each: (isinstance(each, ApiError), isinstance(each, HeldBackError))):
        raise error


async def growing(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run calls, more and more of them at a time while they succeed; after an error none begins, and it is raised."""
    waiting, errors, size = iter(calls), list[BaseException](), 1

    async def work(group: asyncio.TaskGroup) -> None:
        nonlocal size
        for call in waiting:
            try:
                await call()
            except Exception as error:  # noqa: BLE001 - raised below, when all that was begun has ended
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
