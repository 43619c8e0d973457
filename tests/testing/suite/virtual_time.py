"""An event loop whose clock jumps to the next timer when nothing is left to do: an hour of waiting takes no time.

Only for code without sockets, threads and child processes; a test that would wait for ever fails at once, and so does
one in which tasks keep each other busy without time passing, or that runs for longer than a day of virtual time.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


LONGEST_SECONDS = 86_400.0
MOST_TURNS = 200_000


class DeadlockError(AssertionError):
    """No task can make progress any more."""


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError("every task waits for something that no task will do")
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > MOST_TURNS or self.now > LONGEST_SECONDS:
            raise DeadlockError(f"the tasks never come to rest, after {self.now:.0f} s")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 1,000 s, so that 0 stays recognisable as "never"."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return 1000.0 + self._virtual.now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine function, which runs to the end in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


async def run_pending_tasks(turns: int = 50) -> None:
    """Let every task that can run, run, without time passing."""
    for _ in range(turns):
        await asyncio.sleep(0)
