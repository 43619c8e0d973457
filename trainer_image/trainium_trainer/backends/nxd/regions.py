"""Enter and leave the regions of `models.regions` with NxD's collectives.

NxD's layers communicate by themselves, each for its weight. With adapters or frozen weights, the projections of a
region share one input and one output instead.

Guarantees:
- Sums are float32 in any precision.
- With sequence parallelism activations outside are [sequence / ranks, batch, hidden].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from neuronx_distributed.parallel_layers import comm

from trainium_trainer.models.regions import Region

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_SEQUENCE_DIMENSION = 0
_SUM = "sum"


class NxdRegion(Region):
    """A region with NxD's collectives."""

    def __init__(self, group: ProcessGroup, *, sequence_parallel: bool) -> None:
        """Create the region; `sequence_parallel`: whether the sequence is divided outside the regions."""
        self._group = group
        self.sequence_parallel = sequence_parallel

    def gather(self, x: Tensor) -> Tensor:
        """See `Region.gather`."""
        if not self.sequence_parallel:
            return x.view_as(x)
        gathered: Tensor = comm.all_gather(
            x.contiguous(), dim=_SEQUENCE_DIMENSION, groups=self._group, pin_layout=False
        )
        return gathered

    def reduce(self, x: Tensor) -> Tensor:
        """See `Region.reduce`; the result has the type of `x`."""
        size = self._group.size()
        wide = x.to(torch.float32, copy=True).contiguous()  # collectives work in place
        if size == 1:
            return wide.to(x.dtype)
        if not self.sequence_parallel:
            summed: Tensor = comm.all_reduce(_SUM, [wide], groups=self._group, pin_layout=False)[0]
            return summed.to(x.dtype)
        part = torch.empty((wide.shape[0] // size, *wide.shape[1:]), dtype=wide.dtype, device=wide.device)
        comm.reduce_scatter(
            _SUM,
            wide,
            scale=1,
            scatter_dim=_SEQUENCE_DIMENSION,
            shard_count=size,
            groups=self._group,
            output=part,
            pin_layout=False,
        )
        return part.to(x.dtype)
