"""Sum the gradients of which each tensor-parallel rank has only a summand.

These are: norms that have processed their rank's part of the sequence; the half of an adapter that is whole on every
rank, through which the gradient of each rank's part of the other half flows back; keys and values that several ranks
hold, each with other query heads. NxD's LoRA does not sum such gradients, so that the ranks drift apart; its layers sum
those of repeated keys and values.

Guarantees:
- Gradients are summed once per step, after the micro-batches have accumulated.
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
"""The float32 values of one collective, 128 MiB: NxD warns of wrong results above 140 MB."""
_NORMS = "norm.weight"
_WITHIN_REGIONS = ("q_norm.weight", "k_norm.weight", ".bias", ".bias_qkv")
"""Weights that each rank uses only for its heads, outside NxD's functions, which sum gradients by themselves."""


class PartialGradients:
    """The rows of gradients to sum, and the ranks over which to sum them."""

    def __init__(
        self, named: Sequence[NamedParameter], tensor: ProcessGroup, *, sequence_parallel: bool, own_regions: bool
    ) -> None:
        """Find the summands; `own_regions`: projections are computed in `regions`, not by NxD's layers."""
        self._tensor = tensor
        everywhere: list[tuple[int, Piece]] = []
        repeated: list[tuple[int, Piece]] = []
        for number, entry in enumerate(named):
            for piece in entry.pieces:
                if entry.name.endswith(_WITHIN_REGIONS):
                    is_summand = True
                else:
                    is_summand = sequence_parallel if entry.name.endswith(_NORMS) else own_regions
                if is_summand and piece.replicas > 1:
                    (repeated if piece.replicas < tensor.size() else everywhere).append((number, piece))
        self._everywhere, self._repeated = everywhere, repeated

    @torch.no_grad()
    def all_reduce(self, gradients: Sequence[Tensor]) -> None:
        """Replace the summands by their sums. Collective."""
        if self._tensor.size() == 1:
            return
        for bucket in _divide_into_buckets(gradients, self._everywhere):
            _sum(bucket, self._tensor)
        for bucket in _divide_into_buckets(gradients, self._repeated):
            _sum(bucket, parallel_state.get_kv_shared_group())


def _divide_into_buckets(gradients: Sequence[Tensor], locations: Sequence[tuple[int, Piece]]) -> Iterator[list[Tensor]]:
    """Yield the rows in chunks of limited size."""
    bucket: list[Tensor] = []
    for number, piece in locations:
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
