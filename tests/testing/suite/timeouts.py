"""Scale timeouts of tests: what a quiet machine needs with a margin, times how slow this one is just now.

A limit that is written in a test is for a quiet machine of two processors of usual speed. Invariants: it is never
shortened, and at most MOST times as long; a wait ends as soon as what it waits for is there, so that only tests that
fail take longer. A time that a test is about (a lease, a hang limit) is not scaled.
"""

import asyncio
import functools
import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Words = str | Callable[[], str]

VARIABLE = "TRAINIUM_TEST_TIMEOUT_SCALE"
"""Environment variable: a number that is taken instead of what is measured."""
MOST = 6.0
USUAL = 60.0
"""Seconds for what should come within a few."""
_LOOP = 100_000
_LOOP_SECONDS = 0.0040
"""Processor seconds that a usual processor counts to _LOOP in."""


class NotInTimeError(AssertionError):
    """A condition was not met in time."""


def slowness() -> float:
    """Return the slowness of the machine, from 1 (quiet) to MOST; its load is measured at each call."""
    if given := os.environ.get(VARIABLE):
        return _seconds_or_default(given)
    return slowness_of(_best_loop_seconds(), os.getloadavg()[0], _count_running(), os.cpu_count() or 1)


def slowness_of(loop_seconds: float, load: float, running: int, processors: int) -> float:
    """Return how slow the machine is; `load` is an average that lags, `running` counts now, with this process."""
    processor = max(1.0, loop_seconds / _LOOP_SECONDS)
    crowd = max(1.0, load / processors, (running - 1) / processors)
    return min(MOST, processor * crowd)


def scaled(seconds: float) -> float:
    """Return the timeout of a call that may take so many seconds on a quiet machine."""
    return seconds * slowness()


class Deadline:
    """Limit of a wait; it grows while the machine is slow."""

    def __init__(
        self,
        seconds: float = USUAL,
        *,
        clock: Callable[[], float] = time.monotonic,
        slow: Callable[[], float] = slowness,
    ) -> None:
        self._seconds, self._clock, self._slow = seconds, clock, slow
        self._began = clock()

    def waited(self) -> float:
        """Return seconds since its start."""
        return self._clock() - self._began

    def is_over(self) -> bool:
        """Return whether the limit has passed; measure slowness only after the limit of a quiet machine."""
        waited = self.waited()
        return waited > self._seconds and waited > self._seconds * self._slow()

    def check(self, what: Words) -> None:
        """Raise NotInTimeError with these words when it is over."""
        if self.is_over():
            raise NotInTimeError(f"not within {self.waited():.0f} s: {what if isinstance(what, str) else what()}")


def until(condition: Callable[[], T], what: Words, seconds: float = USUAL, *, pause: float = 0.1) -> T:
    """Return the first value of `condition` that is true; raise NotInTimeError with `what` when none comes."""
    deadline = Deadline(seconds)
    while not (found := condition()):
        deadline.check(what)
        time.sleep(pause)
    return found


async def async_until(condition: Callable[[], T], what: Words, seconds: float = USUAL, *, pause: float = 0.02) -> T:
    """Wait as `until` does without blocking the event loop."""
    deadline = Deadline(seconds)
    while not (found := condition()):
        deadline.check(what)
        await asyncio.sleep(pause)
    return found


def _seconds_or_default(given: str) -> float:
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if not 0 < factor < math.inf:
        raise ValueError(f"{VARIABLE} is {given!r}: give how many times as long as on a quiet machine tests wait, as 3")
    return factor


@functools.cache
def _best_loop_seconds() -> float:
    """Return the best of five measurements."""
    return min(_time_loop() for _ in range(5))


def _time_loop() -> float:
    began = time.thread_time()
    total = 0
    for number in range(_LOOP):
        total += number
    return time.thread_time() - began


def _count_running() -> int:
    """Return the number of runnable processes of the machine."""
    with open("/proc/loadavg", encoding="ascii") as file:  # noqa: PTH123 - asked ten times a second
        return int(file.read().split()[3].partition("/")[0])
