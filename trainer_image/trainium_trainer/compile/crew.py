"""Run processes side by side, as many as memory allows; the first one alone, to measure it.

Guarantees:
- When one fails, those beside it are ended with all that they began, and its error is the one that is raised.
- No process outlives the call.
- All stay in this program's process group, by which an agent ends it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainium_agent.linux.kernel import descendants
from trainium_trainer.evaluate.memory import available_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")
_SAMPLE_SECONDS = 0.2
_SHARE = 0.8
"""Of the memory that is left; the others may need a little more than the first."""


def at_once(left: int, most: int, available: int | None, each: int) -> int:
    """PURE. How many processes fit side by side: of `left`, at most `most`, when one takes `each` bytes."""
    if available is None or each <= 0:  # not known
        return 1
    return max(1, min(left, most, int(available * _SHARE) // each))


class Crew:
    """Runs a job for each of some items, each in a separate process."""

    def __init__(self, most: int, available: Callable[[], int | None] = available_bytes) -> None:
        """`most`: so many at once in any case."""
        self._most = most
        self._available = available
        self._seats: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self.largest = 0
        """Memory that the largest process and what it began took, bytes."""
        self.width = 1
        """Number of processes that ran side by side."""

    def each(self, items: Sequence[T], work: Callable[[T, int], None]) -> None:
        """Call `work` with each item and the number of its seat, which no two have at once.

        `work` calls `run`. The first error is raised when no process is left.
        """
        if not items:
            return
        first, *rest = items
        work(first, 0)
        self.width = at_once(len(rest), self._most, self._available(), self.largest) if rest else 1
        for seat in range(self.width):
            self._seats.put(seat)
        with ThreadPoolExecutor(self.width, thread_name_prefix="crew") as pool:
            futures = [pool.submit(self._seated, item, work) for item in rest]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                self._stop()
                raise

    def run(
        self, command: Sequence[str], text: str, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a process with `text` as its input, to its end. Raises OSError when it cannot be started."""
        with self._lock:
            if self._stopped:
                raise RuntimeError("another process failed")
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            self._running.add(process.pid)
        try:
            given: str | None = text
            while True:
                try:
                    out, err = process.communicate(given, timeout=_SAMPLE_SECONDS)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
                except subprocess.TimeoutExpired:
                    given = None
                    self.largest = max(self.largest, memory_of(process.pid))
        finally:
            if process.poll() is None:
                _end(process.pid)
                process.wait()
            with self._lock:
                self._running.discard(process.pid)

    def _seated(self, item: T, work: Callable[[T, int], None]) -> None:
        seat = self._seats.get()
        try:
            work(item, seat)
        finally:
            self._seats.put(seat)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for pid in self._running:
                _end(pid)


def memory_of(process: int) -> int:
    """Resident bytes of a process and of all that it began; what they share counts for each."""
    pages = 0
    for each in (process, *descendants(process)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _end(process: int) -> None:
    """Kill a process and all that it began."""
    for each in (process, *descendants(process)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)
