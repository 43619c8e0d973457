"""Start, reap and signal the agent's child processes.

Guarantees:
- This is the only place that waits for children.
- A process that failed by itself never counts as ended by the agent, even if its exit is collected late.
- A rank's process group is killed before its leader's pid is released to the kernel, so no signal can reach another
  process. What else it started becomes the agent's child (`adopt_orphans`), whatever its session, and is found there.
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

from trainium_contract.exit_codes import exit_code_from_returncode
from trainium_contract.worker_process.process_tree import list_children, list_descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_agent.ranks.output import OutputTail

_KILL_POLL_SECONDS = 0.005
_END_POLL_SECONDS = 0.02
_END_SECONDS = 5.0
_UNCLAIMED = 1000


class Reaper:
    """Collects ended children; only the thread of the SIGCHLD handler calls `reap`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, Callable[[int], None]] = {}
        self._unclaimed: dict[int, int] = {}

    def clear_unclaimed(self) -> None:
        """Drop exit codes of unwatched processes, before each start, so that a recycled pid never gets an old code."""
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

    def list_unwatched(self) -> list[int]:
        """Return the live children that are not watched: orphans of ended processes."""
        with self._lock:
            watched = {*self._watched}
        return [pid for pid in list_children(os.getpid()) if pid not in watched and not _has_ended(pid)]

    def reap(self) -> None:
        """Collect every child that has ended."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            code = ended.si_status if ended.si_code == os.CLD_EXITED else exit_code_from_returncode(-ended.si_status)
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
                        os.killpg(ended.si_pid, signal.SIGKILL)  # the child's process group ends with it
            os.waitpid(ended.si_pid, 0)  # last: only now may the kernel use the pid again


@dataclass(slots=True)
class RankProcess:
    """One training process of this pod; any thread may query and signal it."""

    local_rank: int
    rank: int
    attempt: int
    pid: int
    output: OutputTail
    leftover_processes: tuple[str, ...] = ()
    """Names of the processes that still ran when it ended with code 0."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _end: tuple[int, float] | None = None
    _exit_requested: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    """Set once the exit is recorded."""

    @property
    def alive(self) -> bool:
        """Whether no exit was recorded."""
        return not self.ended.is_set()

    @property
    def exit_code(self) -> int | None:
        """The recorded exit code; None while it is alive."""
        with self._lock:
            return None if self._end is None else self._end[0]

    @property
    def ended_at(self) -> float:
        """Unix seconds of the exit; 0 while it is alive."""
        with self._lock:
            return 0.0 if self._end is None else self._end[1]

    @property
    def exit_requested(self) -> bool:
        """Whether the agent requested its end while it was alive, so that its exit is no failure."""
        with self._lock:
            return self._exit_requested

    def record_exit(self, code: int) -> None:
        """Record the exit."""
        with self._lock:
            self._end = (code, time.time())
        self.ended.set()

    def request_exit(self) -> bool:
        """Record that the agent ends the process, and return whether it is alive."""
        with self._lock:
            return self._request_exit()

    def _request_exit(self) -> bool:
        if self._end is not None or _has_ended(self.pid):
            return False
        self._exit_requested = True
        return True

    def signal(self, number: signal.Signals) -> None:
        """Signal the process; SIGKILL goes to its whole group. Does nothing once it has ended."""
        with self._lock:
            if not self._request_exit():
                return
            if number == signal.SIGKILL:
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, number)
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended but is not reaped yet, so that its exit code is still unknown."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def end_processes(processes: Sequence[RankProcess]) -> None:
    """Kill the processes that are still alive, and wait for their ends."""
    for process in processes:
        process.signal(signal.SIGKILL)
    deadline = time.monotonic() + _END_SECONDS
    while any(process.alive for process in processes) and time.monotonic() < deadline:
        time.sleep(_END_POLL_SECONDS)


def kill_descendants(seconds: float) -> list[int]:
    """Send SIGKILL to all descendants and reap them; return the pids that are left after `seconds`."""

    def reap_and_list() -> list[int]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        return list_descendants(os.getpid())

    return kill_all(reap_and_list, seconds)


def kill_all(list_pids: Callable[[], list[int]], seconds: float) -> list[int]:
    """Send SIGKILL to the listed processes until there is none; return the pids that are left after `seconds`.

    A process of another user, which a debugger left in the pod, is not ours to kill and is ignored.
    """
    deadline = time.monotonic() + seconds
    foreign: set[int] = set()
    while True:
        survivors = [pid for pid in list_pids() if pid not in foreign]
        if not survivors or time.monotonic() > deadline:
            return survivors
        for pid in survivors:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                foreign.add(pid)
            except ProcessLookupError:
                pass
        time.sleep(_KILL_POLL_SECONDS)
