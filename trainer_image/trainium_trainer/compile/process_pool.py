"""Run processes in parallel, as many as memory allows; the first one runs alone to measure it.

Guarantees:
- When one fails, the others are ended with their descendants, and its error is raised.
- No process outlives the call.
- All processes stay in this program's process group, by which an agent ends it.
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

from trainium_contract.worker_process.process_tree import list_descendants
from trainium_trainer.evaluate.memory import read_available_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")
_SAMPLE_SECONDS = 0.2
_SHARE = 0.8
"""The usable fraction of the free memory, because the others may need slightly more than the first."""


def count_parallel(remaining: int, max_processes: int, available: int | None, size: int) -> int:
    """Return how many of `remaining` processes of `size` bytes fit into `available`, at most `max_processes`. Pure."""
    if available is None or size <= 0:  # unknown
        return 1
    return max(1, min(remaining, max_processes, int(available * _SHARE) // size))


class ProcessPool:
    """Runs work for each of some items in separate processes."""

    def __init__(self, max_processes: int, available: Callable[[], int | None] = read_available_bytes) -> None:
        """Create the runner; `max_processes` is the maximum number of parallel processes."""
        self._max_processes = max_processes
        self._available = available
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self.peak_bytes = 0
        """The memory of the largest process and its descendants, in bytes."""
        self.parallel_processes = 1
        """The number of processes that ran in parallel."""

    def call_for_each(self, items: Sequence[T], work: Callable[[T, int], None]) -> None:
        """Call `work` with each item and the number of its slot, which no two share at a time.

        `work` calls `run`. The first error is raised after all processes have ended.
        """
        if not items:
            return
        first, *rest = items
        work(first, 0)
        self.parallel_processes = (
            count_parallel(len(rest), self._max_processes, self._available(), self.peak_bytes) if rest else 1
        )
        for slot in range(self.parallel_processes):
            self._slots.put(slot)
        with ThreadPoolExecutor(self.parallel_processes, thread_name_prefix="process-pool") as pool:
            futures = [pool.submit(self._run_in_slot, item, work) for item in rest]
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
        """Run a process to its end with `text` as its input. Raises OSError if it cannot be started."""
        with self._lock:
            if self._stopped:
                raise RuntimeError("another process failed")
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._running.add(process.pid)
        try:
            pending_input: str | None = text
            while True:
                try:
                    out, err = process.communicate(pending_input, timeout=_SAMPLE_SECONDS)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
                except subprocess.TimeoutExpired:
                    pending_input = None
                    self.peak_bytes = max(self.peak_bytes, read_memory(process.pid))
        finally:
            if process.poll() is None:
                _kill(process.pid)
                process.wait()
            with self._lock:
                self._running.discard(process.pid)

    def _run_in_slot(self, item: T, work: Callable[[T, int], None]) -> None:
        slot = self._slots.get()
        try:
            work(item, slot)
        finally:
            self._slots.put(slot)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for pid in self._running:
                _kill(pid)


def read_memory(process: int) -> int:
    """Return the resident bytes of a process and its descendants; shared memory counts for each."""
    pages = 0
    for member in (process, *list_descendants(process)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _kill(process: int) -> None:
    """Kill a process and its descendants."""
    for member in (process, *list_descendants(process)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)
