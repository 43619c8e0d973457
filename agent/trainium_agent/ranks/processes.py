"""Start, reap and signal the agent's child processes.

Guarantees:
- This is the only place that waits for children.
- A process that failed by itself is never taken for one that the agent ended, however late its exit is collected.
- A rank's process group is killed before its leader's pid is released to the kernel, so no signal can reach another
  process.
- Exit codes follow the shell's convention.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_agent.linux import kernel
from trainium_contract.exit_codes import exit_code_of_wait_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_agent.ranks.output import Tail

_KILL_POLL_SECONDS = 0.005
_UNCLAIMED = 1000


class Reaper:
    """Collects ended children; `reap` is called from the SIGCHLD handler's thread only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, Callable[[int], None]] = {}
        self._unclaimed: dict[int, int] = {}

    def forget_unclaimed(self) -> None:
        """Drop exit codes of strangers; called before a start, so that a recycled pid is never mistaken."""
        with self._lock:
            self._unclaimed.clear()

    def watch(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Call `on_exit(exit code)` once when the child ends, at once if it has ended already."""
        with self._lock:
            code = self._unclaimed.pop(pid, None)
            if code is None:
                self._watched[pid] = on_exit
        if code is not None:
            on_exit(code)

    def unwatched(self) -> list[int]:
        """Return this process's live children that nobody watches: what ended processes have left."""
        with self._lock:
            watched = {*self._watched}
        return [pid for pid in kernel.children(os.getpid()) if pid not in watched and not _has_ended(pid)]

    def reap(self) -> None:
        """Collect every child that has ended."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            code = ended.si_status if ended.si_code == os.CLD_EXITED else exit_code_of_wait_status(-ended.si_status)
            with self._lock:
                on_exit = self._watched.pop(ended.si_pid, None)
                if on_exit is None:
                    if len(self._unclaimed) >= _UNCLAIMED:
                        self._unclaimed.clear()
                    self._unclaimed[ended.si_pid] = code
            if on_exit is not None:
                on_exit(code)
            with contextlib.suppress(OSError):
                if os.getpgid(ended.si_pid) == ended.si_pid != os.getpgrp():
                    os.killpg(ended.si_pid, signal.SIGKILL)  # whatever the child started ends with it
            os.waitpid(ended.si_pid, 0)  # last: only now may the kernel use the pid again


@dataclass(slots=True)
class RankProcess:
    """One training process of this pod; any thread may query and signal it."""

    local_rank: int
    rank: int
    attempt: int
    pid: int
    output: Tail
    left: tuple[str, ...] = ()
    """Names of processes that were left when it ended with code 0."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _end: tuple[int, float] | None = None
    _asked: bool = False

    @property
    def alive(self) -> bool:
        """Whether it has not been seen to end."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """None while it has not been seen to end."""
        with self._lock:
            return None if self._end is None else self._end[0]

    @property
    def ended_at(self) -> float:
        """Unix seconds; 0 while it has not been seen to end."""
        with self._lock:
            return 0.0 if self._end is None else self._end[1]

    @property
    def asked(self) -> bool:
        """Whether the agent requested its end while it lived, so that its exit is no failure."""
        with self._lock:
            return self._asked

    def ended(self, code: int) -> None:
        """Record the exit."""
        with self._lock:
            self._end = (code, time.time())

    def signal(self, number: signal.Signals) -> None:
        """Signal the process; SIGKILL goes to its whole group. Does nothing once it has ended."""
        with self._lock:
            if self._end is not None or _has_ended(self.pid):
                return
            self._asked = True
            if number == signal.SIGKILL:
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, number)
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended and was not collected yet; what it failed with is still on its way."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def kill_descendants(seconds: float) -> list[int]:
    """SIGKILL everything below this process and collect it; the pids that were still there after the time given."""
    deadline = time.monotonic() + seconds
    while True:
        left = kernel.descendants(os.getpid())
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        time.sleep(_KILL_POLL_SECONDS)
