"""The ranks that train on the same samples, found together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from trainium_trainer.data.batches.broadcast import BatchGroup

if TYPE_CHECKING:
    from trainium_trainer.backends.base import Mesh


def batch_group_of(mesh: Mesh) -> BatchGroup:
    """Those of this rank, from the places of all ranks. Collective where samples are shared."""
    if mesh.tp_size * mesh.pp_size == 1:
        return BatchGroup(mesh.rank, mesh.rank)
    places = [torch.zeros(2, dtype=torch.int64) for _ in range(mesh.world_size)]
    dist.all_gather(places, torch.tensor([mesh.dp_rank, mesh.counts_samples]), group=mesh.world)
    found = [tuple(place.tolist()) for place in places]
    same = [rank for rank, (dp_rank, _) in enumerate(found) if dp_rank == mesh.dp_rank]
    leader = next(rank for rank in same if found[rank][1])
    return BatchGroup(leader, mesh.rank, tuple(rank for rank in same if rank != leader), mesh.world)
