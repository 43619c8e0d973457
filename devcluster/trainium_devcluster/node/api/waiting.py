"""Waiting with a limit.

Invariants: a cancellation is never lost. `asyncio.wait_for` of Python 3.11 returns normally when the task is
cancelled at the moment in which what it waits for comes true; `asyncio.timeout` does not.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


async def until(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for `event`, at most `seconds`; returns whether it came."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def within(awaitable: Awaitable[Result], seconds: float | None) -> Result:
    """Return the result of `awaitable`.

    Raises:
        TimeoutError: when it takes longer than `seconds`.
    """
    async with asyncio.timeout(seconds):
        return await awaitable
