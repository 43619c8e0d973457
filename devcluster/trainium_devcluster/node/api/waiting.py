"""Wait with a timeout.

Guarantees:
- A cancellation is never lost. `asyncio.wait_for` of Python 3.11 returns normally if the task is cancelled at the
  moment at which its awaitable completes; `asyncio.timeout` does not.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for `event` for at most `seconds`; return whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def with_timeout(awaitable: Awaitable[Result], seconds: float | None) -> Result:
    """Return the result of `awaitable`.

    Raises:
        TimeoutError: when it takes longer than `seconds`.
    """
    async with asyncio.timeout(seconds):
        return await awaitable
