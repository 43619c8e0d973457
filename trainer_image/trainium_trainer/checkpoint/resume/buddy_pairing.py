"""The collective that assigns each shard that a single node holds to a buddy on another node.

Guarantees:
- All ranks run `assign_buddies` together, after leftovers were cleared.
- The first rank knows all assignments; the others receive those that they have part in.
- A shard whose buddy has no space gets no copy, with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainium_trainer.checkpoint.collectives import scatter_from_root
from trainium_trainer.checkpoint.resume.first_rank import for_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.memory.claims import ShardKey
    from trainium_trainer.checkpoint.memory.memory_tier import MemoryTier
    from trainium_trainer.checkpoint.resume.agreement import BuddyCopy, RankView


@dataclass(frozen=True, slots=True)
class ReplicaTask:
    """A guard that a rank has part in, as source or as target."""

    number: int
    guard: BuddyCopy
    layout: str
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one rank for its tasks."""

    numbers: frozenset[int]
    """The copies for which it has reserved files."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of one rank."""

    numbers: frozenset[int]
    """Numbers of its copies that are kept."""
    keys: frozenset[ShardKey]
    """Shards of which its store has copies."""
    warnings: tuple[str, ...]


def assign_buddies(
    memory: MemoryTier | None, group: ProcessGroup, wanted: Sequence[BuddyCopy], views: Sequence[RankView]
) -> list[str]:
    """Agree on buddies and start copying; returns warnings. Collective over `group`, which spans all ranks.

    `wanted`, `views`: of all ranks, by rank; only the first has them.
    """
    rank = dist.get_rank()
    size = 0 if memory is None else memory.layout.payload_bytes
    # Also a barrier: leftovers are cleared everywhere before anyone makes new files.
    tasks = scatter_from_root(lambda: size, lambda sizes: tasks_of(wanted, views, sizes), group, "resume: copies")
    capacity = _reserve(memory, tasks, rank)
    assignment = scatter_from_root(
        lambda: capacity,
        lambda capacities: assignments_of(wanted, views, capacities),
        group,
        "resume: space for copies",
    )
    if memory is not None:
        memory.local_keys |= assignment.keys
        for task in (task for task in tasks if task.number in assignment.numbers):
            if task.guard.target == rank:
                memory.keep_for(task.guard.key, group, task.guard.source, task.number)
            if task.guard.source == rank:
                memory.send_to(group, task.guard.target, task.number)
    return list(assignment.warnings)


def tasks_of(
    wanted: Sequence[BuddyCopy], views: Sequence[RankView], sizes: Sequence[int]
) -> list[tuple[ReplicaTask, ...]]:
    """PURE. Return the tasks by rank, in the order of the copies. `sizes`: bytes of each rank's own shard."""
    found: list[list[ReplicaTask]] = [[] for _ in views]
    for number, guard in enumerate(wanted):
        task = ReplicaTask(number, guard, views[guard.source].layout, sizes[guard.source])
        for rank in (guard.source, guard.target):
            found[rank].append(task)
    return [tuple(tasks) for tasks in found]


def assignments_of(
    wanted: Sequence[BuddyCopy], views: Sequence[RankView], capacities: Sequence[Capacity]
) -> list[Assignment]:
    """PURE. Return the assignments by rank, once all have reported their capacity."""
    kept = frozenset(number for capacity in capacities for number in capacity.numbers)
    numbers: list[set[int]] = [set() for _ in views]
    copies: dict[str, set[ShardKey]] = {view.store: set() for view in views}
    for number in kept:
        guard = wanted[number]
        copies[views[guard.target].store].add(guard.key)
        numbers[guard.source].add(number)
        numbers[guard.target].add(number)
    keys = {store: frozenset(found) for store, found in copies.items()}
    warnings = for_all(warning for capacity in capacities for warning in capacity.warnings)
    return [Assignment(frozenset(numbers[rank]), keys[view.store], warnings) for rank, view in enumerate(views)]


def _reserve(memory: MemoryTier | None, tasks: Sequence[ReplicaTask], rank: int) -> Capacity:
    """Files for the copies that this rank is to keep."""
    numbers: set[int] = set()
    if memory is None:
        return Capacity(frozenset(), ())
    known = len(memory.warnings)
    for task in tasks:
        if task.guard.target == rank and memory.open_kept(task.guard.key, task.layout, task.payload_bytes):
            numbers.add(task.number)
    return Capacity(frozenset(numbers), tuple(f"rank {rank}: {warning}" for warning in memory.warnings[known:]))
