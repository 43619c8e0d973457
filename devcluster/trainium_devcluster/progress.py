"""Print the progress of long work.

Guarantees:
- A step prints its name at its start, its age every few seconds, and its duration at its end, so that no wait is
  silent. In a log, where lines stay, its age follows at intervals that double up to a minute.
"""

from __future__ import annotations

import contextlib
import fcntl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ReportProgress = Callable[[str], None]

REPORT_INTERVAL_SECONDS = 10.0
_LONGEST_INTERVALS = 6
"""Longest interval in a log, in intervals of a terminal."""


def print_to_stderr(line: str) -> None:
    """Print a line on standard error, because standard output is for results."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def ignore_progress(_line: str) -> None:
    """Print nothing."""


def _ignore() -> str:
    return ""


@contextlib.contextmanager
def hold_lock(lock: Path, work: str, report: ReportProgress) -> Iterator[None]:
    """Hold a lock file; `work` describes the work of another process that holds it."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with ProgressLines(1, report).step(f"waiting for another process that {work}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


class ProgressLines:
    """Numbers the steps of a task: `[3/6] building helm ... 40 s, 120 of 900 packages; then kwok`."""

    def __init__(
        self, total: int, report: ReportProgress = print_to_stderr, interval_seconds: float = REPORT_INTERVAL_SECONDS
    ) -> None:
        self._total = total
        self._report = report
        self._interval_seconds = interval_seconds
        self._longest_seconds = interval_seconds * (1 if sys.stderr.isatty() else _LONGEST_INTERVALS)
        self._number = 0

    def log(self, line: str) -> None:
        """Print a line outside of steps."""
        self._report(line)

    @contextlib.contextmanager
    def step(self, label: str, *, describe_progress: Callable[[], str] = _ignore, then: str = "") -> Iterator[None]:
        """Time a step and report it while it runs; a step that raises is not reported as done.

        `describe_progress` returns the progress of the step, `then` names the steps after it; both may be empty.
        """
        self._number += 1
        label_with_number = f"[{self._number}/{max(self._total, self._number)}] {label}"
        self._report(label_with_number)
        started = time.monotonic()
        finished = threading.Event()

        def report_progress() -> None:
            interval = self._interval_seconds
            while not finished.wait(interval):
                interval = min(2 * interval, self._longest_seconds)
                progress = "".join(f", {text}" for text in (describe_progress(),) if text)
                following = f"; then {then}" if then else ""
                self._report(f"{label_with_number} ... {time.monotonic() - started:.0f} s{progress}{following}")

        reporter = threading.Thread(target=report_progress, name="progress", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            finished.set()
            reporter.join()
        self._report(f"{label_with_number}: done in {time.monotonic() - started:.0f} s")
