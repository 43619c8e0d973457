"""Gradients of which each tensor-parallel rank has a summand only, and their sums.

A norm that has seen its rank's part of the sequence; the half of an adapter that is whole on every rank, through which
each rank's share of the other half flows back; keys and values that several ranks hold, each with other query heads.
NxD's own LoRA leaves such gradients as they are, so that the ranks drift apart; its layers sum those of repeated keys
and values by themselves.

Guarantees:
- A sum is made once a step, of what the micro-batches have added up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from neuronx_distributed.parallel_layers import parallel_state
from torch import distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from trainium_trainer.backends.nxd.layout.pieces import Piece
    from trainium_trainer.backends.nxd.stores import NamedParameter

_BUCKET_VALUES = 32 << 20
"""Float32 numbers of one collective, 128 MiB: NxD warns of wrong numbers above 140 MB."""
_NORMS = "norm.weight"
_WITHIN_REGIONS = ("q_norm.weight", "k_norm.weight", ".bias", ".bias_qkv")
"""Weights that each rank uses for its heads alone, outside of NxD's functions, which sum gradients by themselves."""


class Summands:
    """Which rows of which gradients are summed over which ranks."""

    def __init__(
        self, named: Sequence[NamedParameter], tensor: ProcessGroup, *, sequence: bool, own_regions: bool
    ) -> None:
        """`own_regions`: projections are computed in `regions`, not by NxD's layers."""
        self._tensor = tensor
        everywhere: list[tuple[int, Piece]] = []
        repeated: list[tuple[int, Piece]] = []
        for number, entry in enumerate(named):
            for piece in entry.pieces:
                if entry.name.endswith(_WITHIN_REGIONS):
                    is_summand = True
                else:
                    is_summand = sequence if entry.name.endswith(_NORMS) else own_regions
                if is_summand and piece.replicas > 1:
                    (repeated if piece.replicas < tensor.size() else everywhere).append((number, piece))
        self._everywhere, self._repeated = everywhere, repeated

    @torch.no_grad()
    def add_up(self, gradients: Sequence[Tensor]) -> None:
        """Put the sums in the place of the summands. Collective."""
        if self._tensor.size() == 1:
            return
        for bucket in _buckets(gradients, self._everywhere):
            _sum(bucket, self._tensor)
        for bucket in _buckets(gradients, self._repeated):
            _sum(bucket, parallel_state.get_kv_shared_group())


def _buckets(gradients: Sequence[Tensor], places: Sequence[tuple[int, Piece]]) -> Iterator[list[Tensor]]:
    """Yield the rows in runs of a limited size."""
    bucket: list[Tensor] = []
    for number, piece in places:
        rows = gradients[number][piece.start : piece.end]
        if bucket and sum(part.numel() for part in bucket) + rows.numel() > _BUCKET_VALUES:
            yield bucket
            bucket = []
        bucket.append(rows)
    if bucket:
        yield bucket


def _sum(parts: list[Tensor], group: ProcessGroup) -> None:
    joined = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(joined, group=group)
    for part, values in zip(parts, torch.split(joined, [part.numel() for part in parts]), strict=True):
        part.copy_(values.view(part.shape))
