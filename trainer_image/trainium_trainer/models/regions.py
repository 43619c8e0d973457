"""Entering and leaving a region that tensor parallelism divides: one communication each way.

Between regions activations are whole on every rank, or with sequence parallelism each rank holds its part of the
sequence (Megatron-LM, arXiv 1909.08053 and 2205.05198, section 4.2.2). Invariants: what enters is the same on all ranks
of the group, what leaves is summed over them; the backward pass does the opposite; functional collectives, so that
recompute can keep their results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import _functional_collectives as collectives

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_SEQUENCE_DIMENSION = 1


@dataclass(frozen=True, slots=True)
class Region:
    """The border of the divided regions of a model."""

    group: ProcessGroup
    sequence: bool
    """Whether the sequence is divided outside of the regions."""

    def enter(self, x: Tensor) -> Tensor:
        """[batch, sequence or a part of it, hidden] to [batch, sequence, hidden] for this rank's share of the work."""
        if torch.is_autocast_enabled(x.device.type):
            # The region computes in this type anyway: convert once, before the communication.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        entered: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' summands, [batch, sequence, hidden], or a part of its sequence."""
        left: Tensor = _Leave.apply(x, self)  # type: ignore[no-untyped-call]
        return left

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the group."""
        return arrived(collectives.all_reduce(x.contiguous(), "sum", self.group))

    def total_everywhere(self, x: Tensor) -> Tensor:
        """Return the sum over the group, of which every rank goes on with a different part of the work."""
        summed: Tensor = _Sum.apply(x, self)  # type: ignore[no-untyped-call]
        return summed

    def gather(self, x: Tensor) -> Tensor:
        """All parts of the sequence."""
        parts = x.transpose(0, _SEQUENCE_DIMENSION).contiguous()
        whole = arrived(collectives.all_gather_tensor(parts, 0, self.group))
        return whole.transpose(0, _SEQUENCE_DIMENSION).contiguous()

    def scatter_total(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sequence of the sum over the group."""
        whole = x.transpose(0, _SEQUENCE_DIMENSION).contiguous()
        part = arrived(collectives.reduce_scatter_tensor(whole, "sum", 0, self.group))
        return part.transpose(0, _SEQUENCE_DIMENSION).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return region.gather(x) if region.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        region: Region = ctx.region
        back = region.scatter_total if region.sequence else region.total
        return back(gradients[0]), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return region.scatter_total(x) if region.sequence else region.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        region: Region = ctx.region
        return region.gather(gradients[0]) if region.sequence else gradients[0], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return region.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        region: Region = ctx.region
        return region.total(gradients[0]), None


def arrived(x: Tensor) -> Tensor:
    """Return the result of a functional collective, waited for."""
    return x.wait() if isinstance(x, collectives.AsyncCollectiveTensor) else x
