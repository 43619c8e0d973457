"""The queue of keys between the sources of changes and the workers that reconcile.

Guarantees, each with a test:
1. A waiting key is in the queue once, however often it is put.
2. A key is never given to two workers at the same time.
3. A key that is put while a worker has it is given out again after `mark_done`: no change is missed.
4. Keys are given out in the order in which they were first put, except for guarantee 7.
5. `put_after` puts the key once its delay is over; of several delays the earliest wins. A key that is given out loses
   its delay: its reconcile sees everything, and returns when to run again.
6. `retry` puts the key after a separate exponential delay; `forget` resets that delay.
7. Slow keys are given out while fewer than `most_slow` of them are with workers; the others pass them.
8. After `close`, `get` raises ClosedError at once, delays are dropped, and `wait_until_idle` returns when the
   last worker is done.

Times are those of the running event loop. Not for use from other threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from trainium_operator.backoff import compute_backoff

if TYPE_CHECKING:
    from collections.abc import Hashable

    from trainium_operator.cluster.cache.store import Key

K = TypeVar("K", bound="Hashable")

PLANNING_SHARE = 0.2
"""Share of the time in which a job may be planned; see `PlanRateLimiter`."""
MAX_PAUSE_SECONDS = 1.0
BACKGROUND_SHARE = 0.05
MAX_BACKGROUND_PAUSE_SECONDS = 5.0
"""While thousands of pods start, each plan would only count a few more."""


class ClosedError(Exception):
    """The queue was closed."""


class WorkQueue(Generic[K]):
    """A deduplicating queue with delays; see the module's guarantees."""

    def __init__(self, *, first_delay: float = 0.2, longest_delay: float = 60.0, most_slow: int = 2**31) -> None:
        self._first_delay = first_delay
        self._longest_delay = longest_delay
        self._most_slow = most_slow
        self._slow: set[K] = set()
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()
        self._active: set[K] = set()
        self._delayed: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._wakeups: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of keys that `get` could return now."""
        return len(self._ready)

    def put(self, key: K) -> None:
        """Enqueue the key."""
        if self._closed or key in self._waiting:
            return
        self._waiting.add(key)
        if key not in self._active:
            self._ready.append(key)
            self._wake()

    def put_after(self, key: K, seconds: float) -> None:
        """Enqueue the key after a delay, or earlier if something else enqueues it."""
        if self._closed:
            return
        if seconds <= 0:
            self.put(key)
            return
        loop = asyncio.get_running_loop()
        pending = self._delayed.get(key)
        if pending is not None:
            if pending.when() <= loop.time() + seconds:
                return
            pending.cancel()
        self._delayed[key] = loop.call_later(seconds, self._put_delayed, key)

    def retry(self, key: K) -> float:
        """Enqueue a failed key after its back-off; return the delay in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = compute_backoff(self._first_delay, self._longest_delay, failures)
        self.put_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """Reset the back-off of a key that succeeded."""
        self._failures.pop(key, None)

    def mark_slow(self, key: K) -> None:
        """Mark a key whose reconcile takes long, so that others do not wait for it."""
        self._slow.add(key)

    def mark_fast(self, key: K) -> None:
        """Unmark a key that is quick again, or deleted."""
        self._slow.discard(key)

    def _find_first(self) -> K | None:
        if self._ready and self._ready[0] not in self._slow:
            return self._ready[0]
        has_slow_capacity = sum(key in self._slow for key in self._active) < self._most_slow
        return next((key for key in self._ready if has_slow_capacity or key not in self._slow), None)

    async def get(self) -> K:
        """Wait for the next key; call `mark_done` with it. Raises ClosedError."""
        while (key := self._find_first()) is None:
            if self._closed:
                raise ClosedError
            wakeup: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._wakeups.append(wakeup)
            try:
                await wakeup
            except asyncio.CancelledError:
                # The wake-up that this worker does not use belongs to the next one.
                if wakeup.done() and not wakeup.cancelled():
                    self._wake()
                elif wakeup in self._wakeups:
                    self._wakeups.remove(wakeup)
                raise
        if self._closed:
            raise ClosedError
        self._ready.remove(key)
        self._waiting.discard(key)
        self._active.add(key)
        self._idle.clear()
        pending = self._delayed.pop(key, None)
        if pending is not None:
            pending.cancel()
        return key

    def mark_done(self, key: K) -> None:
        """Mark the key as done by its worker."""
        self._active.discard(key)
        if key in self._waiting and not self._closed:
            self._ready.append(key)
        if self._ready and not self._closed:
            self._wake()  # for this key, or for a slow one that waited for its end
        if not self._active:
            self._idle.set()

    def close(self) -> None:
        """Stop handing out keys, and drop all delays."""
        self._closed = True
        for handle in self._delayed.values():
            handle.cancel()
        self._delayed.clear()
        while self._wakeups:
            self._wake()

    async def wait_until_idle(self) -> None:
        """Wait until no worker has a key."""
        await self._idle.wait()

    def _put_delayed(self, key: K) -> None:
        del self._delayed[key]
        self.put(key)

    def _wake(self) -> None:
        while self._wakeups:
            wakeup = self._wakeups.popleft()
            if not wakeup.done():
                wakeup.set_result(None)
                return


class PlanRateLimiter:
    """Decides how soon a job is planned after a change, by the measured duration of its plans.

    - The first change after a quiet period is planned at once, so a fault never waits.
    - During many changes (a thousand workers start and register) planning takes at most `PLANNING_SHARE` of the
      time, or `BACKGROUND_SHARE` if none of the changes is urgent.
    - The last change is never missed.
    """

    def __init__(self, queue: WorkQueue[Key]) -> None:
        self._queue = queue
        self._next: dict[Key, float] = {}
        self._next_background: dict[Key, float] = {}

    def put(self, key: Key, *, urgent: bool = True) -> None:
        """Enqueue the job now, or as soon as the limit allows; after a longer pause if it is not urgent."""
        allowed_at = (self._next if urgent else self._next_background).get(key, 0.0)
        self._queue.put_after(key, allowed_at - asyncio.get_running_loop().time())

    def record_plan(self, key: Key, spent: float, ended: float) -> None:
        """Record a plan that ended at `ended` (loop time) and took `spent` seconds."""
        self._next[key] = ended + min(MAX_PAUSE_SECONDS, spent * (1.0 / PLANNING_SHARE - 1.0))
        self._next_background[key] = ended + min(MAX_BACKGROUND_PAUSE_SECONDS, spent * (1.0 / BACKGROUND_SHARE - 1.0))

    def forget(self, key: Key) -> None:
        """Forget a deleted job."""
        self._next.pop(key, None)
        self._next_background.pop(key, None)
