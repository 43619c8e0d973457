"""The collective that gives each shard that a single node holds a buddy on another node.

Invariants: all ranks run `pair_up` together, after leftovers were cleared, and agree; a shard whose buddy has no room
goes without, with a warning; where every shard is in several places nothing is said and nothing is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainium_trainer.checkpoint.agreement import guards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.agreement import Guard, RankView
    from trainium_trainer.checkpoint.memory import MemoryTier


@dataclass(frozen=True, slots=True)
class _Room:
    """What one rank says in the round of promises."""

    numbers: frozenset[int]
    """The guards for which it has reserved files."""
    warnings: tuple[str, ...]


def pair_up(memory: MemoryTier | None, group: ProcessGroup, views: Sequence[RankView], broken: set[str]) -> list[str]:
    """Agree on buddies and start copying; `broken` are the stores without room. Returns warnings, equal on all ranks.

    Collective over `group`, which spans all ranks; `views` are equal on all of them, by rank.
    """
    rank = dist.get_rank()
    wanted = guards(views, {view.store for view in views} - broken)
    if not wanted:
        return []
    sizes: list[int] = [0] * len(views)
    # Also a barrier: leftovers are cleared everywhere before anyone makes new files.
    dist.all_gather_object(sizes, 0 if memory is None else memory.layout.payload_bytes, group=group)
    promised: list[_Room | None] = [None] * len(views)
    dist.all_gather_object(promised, _reserve(memory, wanted, views, sizes, rank), group=group)
    rooms = [room for room in promised if room is not None]
    kept = frozenset(number for room in rooms for number in room.numbers)
    if memory is not None:
        here = views[rank].store
        memory.local_keys |= {wanted[number].key for number in kept if views[wanted[number].target].store == here}
        for number in sorted(kept):
            guard = wanted[number]
            if guard.target == rank:
                memory.keep_for(guard.key, group, guard.source, number)
            if guard.source == rank:
                memory.send_to(group, guard.target, number)
    return [warning for room in rooms for warning in room.warnings]


def _reserve(
    memory: MemoryTier | None, wanted: Sequence[Guard], views: Sequence[RankView], sizes: Sequence[int], rank: int
) -> _Room:
    """Files for the copies that this rank is to keep."""
    numbers: set[int] = set()
    if memory is None:
        return _Room(frozenset(), ())
    known = len(memory.warnings)
    for number, guard in enumerate(wanted):
        if guard.target != rank:
            continue
        if memory.open_kept(guard.key, views[guard.source].layout, sizes[guard.source]):
            numbers.add(number)
    return _Room(frozenset(numbers), tuple(f"rank {rank}: {warning}" for warning in memory.warnings[known:]))
