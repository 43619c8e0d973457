"""Objects of an API that not every cluster serves, read once it is served.

Invariant: nothing waits for it. Without it nothing is read, and every job that does not need it is planned.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from trainium_operator.plan.model.observed import ApiState

if TYPE_CHECKING:
    from trainium_operator.cluster.cache.reflector import Reflector


class OptionalApi:
    """The reflectors of one API, which start once discovery finds it."""

    def __init__(self, enabled: bool, *reflectors: Reflector[Any]) -> None:
        self._enabled = enabled
        self._reflectors = reflectors
        self._served = asyncio.Event()

    @property
    def state(self) -> ApiState:
        """Return the state of the API."""
        if not self._enabled:
            return ApiState.OFF
        if not self._served.is_set():
            return ApiState.ABSENT
        return ApiState.READY if all(reflector.synced.is_set() for reflector in self._reflectors) else ApiState.READING

    def set_served(self, served: bool) -> None:
        """Record whether discovery found the API."""
        if served and self._enabled:
            self._served.set()
        else:
            self._served.clear()

    async def wait_until_served(self) -> None:
        """Wait until the API is served."""
        await self._served.wait()

    async def read(self, group: asyncio.TaskGroup) -> None:
        """Start tasks of the group that watch its objects; return when each kind has been listed once."""
        for reflector in self._reflectors:
            group.create_task(reflector.run())
        for reflector in self._reflectors:
            await reflector.synced.wait()
