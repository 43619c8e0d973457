"""What is left over: after the job against before it, and what grew in those that lived through it.

Invariants: pure; a process is compared with itself (pid and when it began); growth is that of the median of its last
quarter over that of its second, so that warming up and a single look weigh nothing. Files, sockets and threads that
another process with the same task had from its second quarter on are no growth: the agent of a spare that becomes the
one which holds the generation's store has that one's connections from then on.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.soak.census import OURS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.soak.census import Census, Process

LEAST_LOOKS = 16
"""Of a process whose growth is judged."""
MORE_MEGABYTES = 16.0
MORE_SHARE = 0.15
MORE_DESCRIPTORS = 8
MORE_FILES = 40
"""Of a node's or the job's files, logs and markers of single pods among them."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What one process has more than before."""

    role: str
    looks: int
    minutes: float
    megabytes: tuple[float, float]
    files: tuple[float, float]
    sockets: tuple[float, float]
    threads: tuple[float, float]


def growths(looks: Sequence[Census]) -> list[Growth]:
    """Of each process that was there for long, the longest-lived first."""
    lives: dict[tuple[int, float, str], list[tuple[float, Process]]] = defaultdict(list)
    for look in looks:
        for process in look.processes:
            lives[process.pid, process.began, process.role].append((look.at, process))
    found = [
        Growth(
            role=role,
            looks=len(life),
            minutes=round((life[-1][0] - life[0][0]) / 60, 1),
            megabytes=_ends([each.megabytes for _, each in life]),
            files=_ends([each.files for _, each in life]),
            sockets=_ends([each.sockets for _, each in life]),
            threads=_ends([each.threads for _, each in life]),
        )
        for (_, _, role), life in lives.items()
        if len(life) >= LEAST_LOOKS
    ]
    return sorted(found, key=lambda each: -each.minutes)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    quarter = len(values) // 4
    return median(values[quarter : 2 * quarter]), median(values[-quarter:])


def wrong_growth(looks: Sequence[Census]) -> Iterator[str]:
    """What grew, as sentences; of the programs of Kubernetes nothing is judged."""
    found = growths(looks)
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


def wrong_leftovers(before: Census, after: Census) -> Iterator[str]:
    """What the job left behind, as sentences: `before` it was made, `after` it was deleted."""
    for role in sorted({*before.roles(), *after.roles()}):
        first, last = before.roles().get(role, 0), after.roles().get(role, 0)
        if last > first:
            yield f"{last - first} more processes ({role}) than before the job"
    for kind, count in after.objects.items():
        if count > before.objects.get(kind, 0):
            yield f"{count - before.objects.get(kind, 0)} {kind} are left"
    if after.shared_memory > before.shared_memory:
        yield f"{after.shared_memory - before.shared_memory} entries of /dev/shm are left"
    if after.node_files > before.node_files + MORE_FILES:
        yield f"{after.node_files - before.node_files} more files in the folders of the nodes"
    for role in sorted(OURS & set(before.roles()) & set(after.roles())):
        first, last = (max(one.sockets for one in census.processes if one.role == role) for census in (before, after))
        if last > first + MORE_DESCRIPTORS:
            yield f"a process ({role}) has {last} sockets, before the job at most {first}"


def wrong_job_files(looks: Sequence[Census]) -> Iterator[str]:
    """Files of the job must not become more and more: what is kept of checkpoints is bounded."""
    counts = [look.job_files for look in looks if look.job_files]
    if len(counts) < LEAST_LOOKS:
        return
    before, after = _ends(counts)
    if after - before > MORE_FILES:
        yield f"the job's folder had {before:.0f} files, later {after:.0f}"
