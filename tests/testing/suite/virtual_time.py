"""An event loop whose clock jumps to the next timer when no task is ready.

It is for code without sockets, threads and child processes. It raises DeadlockError when all tasks wait forever, when
tasks run without time passing, and after a day of virtual time.
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
            raise DeadlockError("every task waits for another one")
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > MOST_TURNS or self.now > LONGEST_SECONDS:
            raise DeadlockError(f"the tasks never become idle, after {self.now:.0f} s")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time; `time()` starts at 1,000 s because 0 means "never"."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return 1000.0 + self._virtual.now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorate a test that is a coroutine function: run it in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


async def run_pending_tasks() -> None:
    """Run all ready tasks without advancing the time."""
    for _ in range(50):
        await asyncio.sleep(0)
