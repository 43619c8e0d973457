"""The collective that gives each shard that a single node holds a buddy on another node.

Invariants: all ranks run `pair_up` together, after leftovers were cleared; the first rank knows who shall guard what,
the others hear of what they keep and send; a shard whose buddy has no room goes without, with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainium_trainer.checkpoint.collectives import deal
from trainium_trainer.checkpoint.resume.first_rank import for_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.memory.claims import ShardKey
    from trainium_trainer.checkpoint.memory.memory_tier import MemoryTier
    from trainium_trainer.checkpoint.resume.agreement import BuddyCopy, RankView


@dataclass(frozen=True, slots=True)
class Duty:
    """A guard that a rank has part in, as source or as target."""

    number: int
    guard: BuddyCopy
    layout: str
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """What one rank says of its duties."""

    numbers: frozenset[int]
    """The guards for which it has reserved files."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Promise:
    """What comes of it for one rank."""

    numbers: frozenset[int]
    """Of its guards those that are kept."""
    keys: frozenset[ShardKey]
    """Shards of which its store has copies."""
    warnings: tuple[str, ...]


def pair_up(
    memory: MemoryTier | None, group: ProcessGroup, wanted: Sequence[BuddyCopy], views: Sequence[RankView]
) -> list[str]:
    """Agree on buddies and start copying; returns warnings. Collective over `group`, which spans all ranks.

    `wanted`, `views`: of all ranks, by rank; only the first has them.
    """
    rank = dist.get_rank()
    size = 0 if memory is None else memory.layout.payload_bytes
    # Also a barrier: leftovers are cleared everywhere before anyone makes new files.
    duties = deal(lambda: size, lambda sizes: duties_of(wanted, views, sizes), group, "resume: copies")
    room = _reserve(memory, duties, rank)
    promise = deal(lambda: room, lambda rooms: promises_of(wanted, views, rooms), group, "resume: room for copies")
    if memory is not None:
        memory.local_keys |= promise.keys
        for duty in (duty for duty in duties if duty.number in promise.numbers):
            if duty.guard.target == rank:
                memory.keep_for(duty.guard.key, group, duty.guard.source, duty.number)
            if duty.guard.source == rank:
                memory.send_to(group, duty.guard.target, duty.number)
    return list(promise.warnings)


def duties_of(wanted: Sequence[BuddyCopy], views: Sequence[RankView], sizes: Sequence[int]) -> list[tuple[Duty, ...]]:
    """PURE. By rank, in the order of the guards. `sizes`: bytes of each rank's own shard."""
    found: list[list[Duty]] = [[] for _ in views]
    for number, guard in enumerate(wanted):
        duty = Duty(number, guard, views[guard.source].layout, sizes[guard.source])
        for rank in (guard.source, guard.target):
            found[rank].append(duty)
    return [tuple(duties) for duties in found]


def promises_of(wanted: Sequence[BuddyCopy], views: Sequence[RankView], rooms: Sequence[Room]) -> list[Promise]:
    """PURE. By rank, once all have said what they have room for."""
    kept = frozenset(number for room in rooms for number in room.numbers)
    numbers: list[set[int]] = [set() for _ in views]
    copies: dict[str, set[ShardKey]] = {view.store: set() for view in views}
    for number in kept:
        guard = wanted[number]
        copies[views[guard.target].store].add(guard.key)
        numbers[guard.source].add(number)
        numbers[guard.target].add(number)
    keys = {store: frozenset(found) for store, found in copies.items()}
    warnings = for_all(warning for room in rooms for warning in room.warnings)
    return [Promise(frozenset(numbers[rank]), keys[view.store], warnings) for rank, view in enumerate(views)]


def _reserve(memory: MemoryTier | None, duties: Sequence[Duty], rank: int) -> Room:
    """Files for the copies that this rank is to keep."""
    numbers: set[int] = set()
    if memory is None:
        return Room(frozenset(), ())
    known = len(memory.warnings)
    for duty in duties:
        if duty.guard.target == rank and memory.open_kept(duty.guard.key, duty.layout, duty.payload_bytes):
            numbers.add(duty.number)
    return Room(frozenset(numbers), tuple(f"rank {rank}: {warning}" for warning in memory.warnings[known:]))
