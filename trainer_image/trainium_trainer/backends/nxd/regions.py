"""Entering and leaving a divided region with NxD's collectives: one communication each way, as `models.regions`.

NxD's layers communicate by themselves, each for its own weight. Where adapters stand beside a projection, or weights
are frozen, the projections of a region share one input and one output instead.

Guarantees:
- What enters is the same on all ranks of the group, what leaves is summed over them, and the backward pass does the
  opposite.
- Sums are float32 in any precision.
- With sequence parallelism activations outside are [sequence / ranks, batch, hidden].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from neuronx_distributed.parallel_layers import comm

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_SEQUENCE_DIMENSION = 0
_SUM = "sum"


class NxdRegion:
    """The border of the divided regions of a model."""

    def __init__(self, group: ProcessGroup, *, sequence: bool) -> None:
        """`sequence`: whether the sequence is divided outside of the regions."""
        self._group = group
        self.sequence = sequence

    def enter(self, x: Tensor) -> Tensor:
        """Return what every rank has, or the ranks' parts of the sequence joined, for this rank's share of the work."""
        entered: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """Return this rank's summand to the sum of all ranks', or to this rank's part of its sequence."""
        left: Tensor = _Leave.apply(x, self)  # type: ignore[no-untyped-call]
        return left

    def spread(self, x: Tensor) -> Tensor:
        """All parts of the sequence, or `x` itself where it is whole."""
        if not self.sequence:
            return x.view_as(x)
        whole: Tensor = comm.all_gather(x.contiguous(), dim=_SEQUENCE_DIMENSION, groups=self._group, pin_layout=False)
        return whole

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the group, or this rank's part of its sequence, in the type of `x`."""
        size = self._group.size()
        wide = x.to(torch.float32, copy=True).contiguous()  # collectives write where they read
        if size == 1:
            return wide.to(x.dtype)
        if not self.sequence:
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


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: NxdRegion) -> Tensor:
        ctx.region = region
        return region.spread(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        region: NxdRegion = ctx.region
        return region.total(gradients[0]), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: NxdRegion) -> Tensor:
        ctx.region = region
        return region.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        region: NxdRegion = ctx.region
        return region.spread(gradients[0]), None
