"""Find leaks: leftovers after the jobs of all rows, and growth of long-lived processes.

Guarantees:
- A process is identified by its pid and start time.
- Growth is the difference between the medians of the last and the second quarter, so warm-up does not count.
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

from benchmarks.faults.resource_usage import PROJECT_ROLES, measure_usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.faults.environment import FaultEnvironment
    from benchmarks.faults.resource_usage import Process, ResourceUsage

SAMPLE_SECONDS = 20.0
DELETION_SECONDS = 90.0
MIN_SAMPLES = 16
"""Least number of samples of a process that is checked for growth."""
MAX_GROWTH_MEGABYTES = 16.0
MAX_GROWTH_FRACTION = 0.15
MAX_GROWTH_DESCRIPTORS = 8
MAX_GROWTH_FILES = 40
"""Allowed growth of the files of nodes or of the job, which include logs of single pods."""


@dataclass(frozen=True, slots=True)
class ResourceGrowth:
    """Medians of a process in its second and its last quarter."""

    role: str
    minutes: float
    megabytes: tuple[float, float]
    files: tuple[float, float]
    sockets: tuple[float, float]
    threads: tuple[float, float]


def measure_process_growth(samples: Sequence[ResourceUsage]) -> list[ResourceGrowth]:
    """Return the growth of each long-lived process, the longest-lived first."""
    histories: dict[tuple[int, float, str], list[tuple[float, Process]]] = defaultdict(list)
    for sample in samples:
        for process in sample.processes:
            histories[process.pid, process.started_at, process.role].append((sample.measured_at, process))
    growth = [
        ResourceGrowth(
            role=role,
            minutes=round((history[-1][0] - history[0][0]) / 60, 1),
            megabytes=_compute_quarter_medians([process.megabytes for _, process in history]),
            files=_compute_quarter_medians([process.files for _, process in history]),
            sockets=_compute_quarter_medians([process.sockets for _, process in history]),
            threads=_compute_quarter_medians([process.threads for _, process in history]),
        )
        for (_, _, role), history in histories.items()
        if len(history) >= MIN_SAMPLES
    ]
    return sorted(growth, key=lambda process: -process.minutes)


def _compute_quarter_medians(values: Sequence[float]) -> tuple[float, float]:
    quarter = len(values) // 4
    return median(values[quarter : 2 * quarter]), median(values[-quarter:])


def find_growth(samples: Sequence[ResourceUsage]) -> Iterator[str]:
    """Yield a sentence for each process that grew; programs of Kubernetes are not checked."""
    growth = measure_process_growth(samples)
    for process in growth:
        if process.role not in PROJECT_ROLES:
            continue
        peers = [other for other in growth if other.role == process.role and other is not process]
        start = f"a process ({process.role})"
        before, after = process.megabytes
        if after - before > max(MAX_GROWTH_MEGABYTES, MAX_GROWTH_FRACTION * before):
            yield f"{start} grew from {before:.0f} to {after:.0f} MB within {process.minutes:.0f} minutes"
        for resource in ("files", "sockets", "threads"):
            before, after = getattr(process, resource)
            most_of_peers = max((getattr(peer, resource)[0] for peer in peers), default=0.0)
            if after - max(before, most_of_peers) > MAX_GROWTH_DESCRIPTORS:
                yield f"{start} had {before:.0f} open {resource}, later {after:.0f}"


def find_leftovers(before: ResourceUsage, after: ResourceUsage) -> Iterator[str]:
    """Yield a sentence for each leftover of the jobs."""
    for role in sorted({*before.count_roles(), *after.count_roles()}):
        first, last = before.count_roles().get(role, 0), after.count_roles().get(role, 0)
        if last > first:
            yield f"{last - first} more processes ({role}) than before the jobs"
    for kind, count in after.objects.items():
        if count > before.objects.get(kind, 0):
            yield f"{count - before.objects.get(kind, 0)} {kind} remain"
    if after.shared_memory > before.shared_memory:
        yield f"{after.shared_memory - before.shared_memory} entries of /dev/shm remain"
    if after.node_files > before.node_files + MAX_GROWTH_FILES:
        yield f"{after.node_files - before.node_files} more files in the folders of the nodes"
    for role in sorted(PROJECT_ROLES & set(before.count_roles()) & set(after.count_roles())):
        first, last = (
            max(process.sockets for process in usage.processes if process.role == role) for usage in (before, after)
        )
        if last > first + MAX_GROWTH_DESCRIPTORS:
            yield f"a process ({role}) has {last} sockets, before the jobs at most {first}"


def find_job_files(samples: Sequence[ResourceUsage]) -> Iterator[str]:
    """Yield a sentence if the folders of the jobs grow, because the number of checkpoints is bounded."""
    counts = [sample.job_files for sample in samples if sample.job_files]
    if len(counts) < MIN_SAMPLES:
        return
    before, after = _compute_quarter_medians(counts)
    if after - before > MAX_GROWTH_FILES:
        yield f"the jobs' folders had {before:.0f} files, later {after:.0f}"


class LeakDetector:
    """Measures resource usage at intervals in a background thread, and finds leaks."""

    def __init__(self, env: FaultEnvironment) -> None:
        self._env = env
        self._samples: list[ResourceUsage] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._before = measure_usage(self._env)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(60)

    def report(self) -> list[str]:
        """Print how long-lived processes grew, and return a sentence for each leak."""
        table = Table(title="Long-lived processes: second quarter and last")
        for heading in ("process", "minutes", "MB", "files", "sockets", "threads"):
            table.add_column(heading, justify="left" if heading == "process" else "right")
        for process in measure_process_growth(self._samples):
            pairs = (process.megabytes, process.files, process.sockets, process.threads)
            table.add_row(
                process.role, f"{process.minutes:.0f}", *(f"{first:.0f} → {last:.0f}" for first, last in pairs)
            )
        Console(width=120).print(table)
        after = self._measure_usage_after_deletion()
        return [*find_leftovers(self._before, after), *find_growth(self._samples), *find_job_files(self._samples)]

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            with suppress(OSError):
                self._samples.append(measure_usage(self._env))

    def _measure_usage_after_deletion(self) -> ResourceUsage:
        """Return the first usage without leftovers of the jobs, or the last one before the timeout."""
        deadline = time.monotonic() + DELETION_SECONDS
        while True:
            after = measure_usage(self._env)
            if not list(find_leftovers(self._before, after)) or time.monotonic() > deadline:
                return after
            time.sleep(3)
