"""Scale timeouts of tests by the current slowness of the machine.

A timeout in a test is for an idle machine with two processors of usual speed. Times that a test is about (a lease, a
hang limit) are not scaled.

Guarantees:
- A timeout is never shortened, and at most MOST times as long.
- A wait ends once its condition is true, so that only failing tests take longer.
"""

import asyncio
import functools
import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Message = str | Callable[[], str]

VARIABLE = "TRAINIUM_TEST_TIMEOUT_SCALE"
"""Environment variable with a slowness that replaces the measured one."""
MOST = 6.0
USUAL = 60.0
"""Timeout in seconds of events that should occur within a few seconds."""
_LOOP = 100_000
_LOOP_SECONDS = 0.0040
"""Processor seconds in which a usual processor counts to _LOOP."""


class NotInTimeError(AssertionError):
    """A condition was not met in time."""


def slowness() -> float:
    """Return the slowness of the machine, from 1 (idle) to MOST; its load is measured at each call."""
    if given := os.environ.get(VARIABLE):
        return _seconds_or_default(given)
    return slowness_of(_best_loop_seconds(), os.getloadavg()[0], _count_running(), os.cpu_count() or 1)


def slowness_of(loop_seconds: float, load: float, running: int, processors: int) -> float:
    """Return how slow the machine is; `load` is an average that lags, `running` counts now, with this process."""
    processor = max(1.0, loop_seconds / _LOOP_SECONDS)
    contention = max(1.0, load / processors, (running - 1) / processors)
    return min(MOST, processor * contention)


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
        self._started_at = clock()

    def elapsed_seconds(self) -> float:
        """Return the seconds since the start."""
        return self._clock() - self._started_at

    def is_over(self) -> bool:
        """Return whether the limit has passed; measure slowness only after the limit of a quiet machine."""
        elapsed_seconds = self.elapsed_seconds()
        return elapsed_seconds > self._seconds and elapsed_seconds > self._seconds * self._slow()

    def check(self, message: Message) -> None:
        """Raise NotInTimeError with this message when the limit has passed."""
        if self.is_over():
            raise NotInTimeError(
                f"not within {self.elapsed_seconds():.0f} s: {message if isinstance(message, str) else message()}"
            )


def until(condition: Callable[[], T], message: Message, seconds: float = USUAL, *, pause: float = 0.1) -> T:
    """Return the first value of `condition` that is true; raise NotInTimeError with `message` after the timeout."""
    deadline = Deadline(seconds)
    while not (value := condition()):
        deadline.check(message)
        time.sleep(pause)
    return value


async def async_until(
    condition: Callable[[], T], message: Message, seconds: float = USUAL, *, pause: float = 0.02
) -> T:
    """Wait as `until` does without blocking the event loop."""
    deadline = Deadline(seconds)
    while not (value := condition()):
        deadline.check(message)
        await asyncio.sleep(pause)
    return value


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
    started_at = time.thread_time()
    total = 0
    for number in range(_LOOP):
        total += number
    return time.thread_time() - started_at


def _count_running() -> int:
    """Return the number of runnable processes of the machine."""
    with open("/proc/loadavg", encoding="ascii") as file:  # noqa: PTH123 - read ten times a second
        return int(file.read().split()[3].partition("/")[0])
