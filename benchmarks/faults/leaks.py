"""Find leaks: leftovers after the jobs of all rows, and growth of long-lived processes.

Guarantees:
- A process is compared with itself (pid and start time).
- Growth is the median of the last quarter over that of the second quarter, so warm-up does not count.
- Files, sockets and threads up to the number of another process of the role in its second quarter are no growth: an
  agent that becomes the host of the generation's store gets the connections of the previous host.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.table import Table

from benchmarks.faults.resource_usage import OURS, measure_usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.faults.environment import FaultEnvironment
    from benchmarks.faults.resource_usage import Process, ResourceUsage

SAMPLE_SECONDS = 20.0
DELETION_SECONDS = 90.0
MIN_SAMPLES = 16
"""Least number of samples of a process that is checked for growth."""
MORE_MEGABYTES = 16.0
MORE_SHARE = 0.15
MORE_DESCRIPTORS = 8
MORE_FILES = 40
"""Allowed growth of the files of nodes or of the job, which include logs of single pods."""


@dataclass(frozen=True, slots=True)
class ResourceGrowth:
    """Growth of a process from its second to its last quarter."""

    role: str
    samples: int
    minutes: float
    megabytes: tuple[float, float]
    files: tuple[float, float]
    sockets: tuple[float, float]
    threads: tuple[float, float]


def process_growth(samples: Sequence[ResourceUsage]) -> list[ResourceGrowth]:
    """Return the growth of each long-lived process, the longest-lived first."""
    lives: dict[tuple[int, float, str], list[tuple[float, Process]]] = defaultdict(list)
    for sample in samples:
        for process in sample.processes:
            lives[process.pid, process.started, process.role].append((sample.at, process))
    found = [
        ResourceGrowth(
            role=role,
            samples=len(life),
            minutes=round((life[-1][0] - life[0][0]) / 60, 1),
            megabytes=_quarter_medians([each.megabytes for _, each in life]),
            files=_quarter_medians([each.files for _, each in life]),
            sockets=_quarter_medians([each.sockets for _, each in life]),
            threads=_quarter_medians([each.threads for _, each in life]),
        )
        for (_, _, role), life in lives.items()
        if len(life) >= MIN_SAMPLES
    ]
    return sorted(found, key=lambda each: -each.minutes)


def _quarter_medians(values: Sequence[float]) -> tuple[float, float]:
    quarter = len(values) // 4
    return median(values[quarter : 2 * quarter]), median(values[-quarter:])


def find_growth(samples: Sequence[ResourceUsage]) -> Iterator[str]:
    """Yield a sentence for each process that grew; programs of Kubernetes are not checked."""
    found = process_growth(samples)
    for each in found:
        if each.role not in OURS:
            continue
        peers = [other for other in found if other.role == each.role and other is not each]
        before, after = each.megabytes
        if after - before > max(MORE_MEGABYTES, MORE_SHARE * before):
            yield f"a process ({each.role}) grew from {before:.0f} to {after:.0f} MB within {each.minutes:.0f} minutes"
        for what in ("files", "sockets", "threads"):
            first, last = getattr(each, what)
            usual = max((getattr(peer, what)[0] for peer in peers), default=0.0)
            if last - max(first, usual) > MORE_DESCRIPTORS:
                yield f"a process ({each.role}) had {first:.0f} open {what}, later {last:.0f}"


def find_leftovers(before: ResourceUsage, after: ResourceUsage) -> Iterator[str]:
    """Yield a sentence for each leftover of the jobs."""
    for role in sorted({*before.roles(), *after.roles()}):
        first, last = before.roles().get(role, 0), after.roles().get(role, 0)
        if last > first:
            yield f"{last - first} more processes ({role}) than before the jobs"
    for kind, count in after.objects.items():
        if count > before.objects.get(kind, 0):
            yield f"{count - before.objects.get(kind, 0)} {kind} remain"
    if after.shared_memory > before.shared_memory:
        yield f"{after.shared_memory - before.shared_memory} entries of /dev/shm remain"
    if after.node_files > before.node_files + MORE_FILES:
        yield f"{after.node_files - before.node_files} more files in the folders of the nodes"
    for role in sorted(OURS & set(before.roles()) & set(after.roles())):
        first, last = (max(one.sockets for one in usage.processes if one.role == role) for usage in (before, after))
        if last > first + MORE_DESCRIPTORS:
            yield f"a process ({role}) has {last} sockets, before the jobs at most {first}"


def find_job_files(samples: Sequence[ResourceUsage]) -> Iterator[str]:
    """Yield a sentence if the folders of the jobs grow, because the number of checkpoints is bounded."""
    counts = [sample.job_files for sample in samples if sample.job_files]
    if len(counts) < MIN_SAMPLES:
        return
    before, after = _quarter_medians(counts)
    if after - before > MORE_FILES:
        yield f"the jobs' folders had {before:.0f} files, later {after:.0f}"


class LeakDetector:
    """Takes a census at intervals within a block, and finds leaks."""

    def __init__(self, env: FaultEnvironment) -> None:
        self._env = env
        self._samples: list[ResourceUsage] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._before = measure_usage(self._env)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def found(self) -> list[str]:
        """Print how long-lived processes grew, and return a sentence for each leak."""
        table = Table(title="Long-lived processes: second quarter and last")
        for heading in ("process", "minutes", "MB", "files", "sockets", "threads"):
            table.add_column(heading, justify="left" if heading == "process" else "right")
        for each in process_growth(self._samples):
            pairs = (each.megabytes, each.files, each.sockets, each.threads)
            table.add_row(each.role, f"{each.minutes:.0f}", *(f"{first:.0f} → {last:.0f}" for first, last in pairs))
        Console(width=120).print(table)
        after = self._usage_after_deletion()
        return [*find_leftovers(self._before, after), *find_growth(self._samples), *find_job_files(self._samples)]

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            with suppress(OSError):
                self._samples.append(measure_usage(self._env))

    def _usage_after_deletion(self) -> ResourceUsage:
        """Return the first census without leftovers of the jobs, or the last one before the timeout."""
        deadline = time.monotonic() + DELETION_SECONDS
        while True:
            after = measure_usage(self._env)
            if not list(find_leftovers(self._before, after)) or time.monotonic() > deadline:
                return after
            time.sleep(3)
