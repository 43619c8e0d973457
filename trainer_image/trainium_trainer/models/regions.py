"""Enter and leave a region that tensor parallelism divides, with one communication each.

Between regions activations are whole on every rank, or with sequence parallelism each rank holds its part of the
sequence (Megatron-LM, arXiv 1909.08053 and 2205.05198, section 4.2.2).

Guarantees:
- The input is the same on all ranks of the group, and the output is summed over them.
- The backward pass does the opposite.
- The collectives of `FunctionalRegion` are functional, so that recompute can keep their results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import _functional_collectives as collectives

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_SEQUENCE_DIMENSION = 1


class Region(ABC):
    """The entry and exit of the divided regions of a model; a subclass has the collectives."""

    sequence_parallel: bool
    """Whether the sequence is divided outside the regions."""

    def enter(self, x: Tensor) -> Tensor:
        """Return the region's input: the input itself, or the gathered parts of its sequence."""
        entered: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """Sum the ranks' outputs; return the sum, or this rank's part of its sequence."""
        result: Tensor = _Leave.apply(x, self)  # type: ignore[no-untyped-call]
        return result

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """Gather all parts of the sequence; return a view of `x` if it is whole."""

    @abstractmethod
    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the group, or this rank's part of its sequence."""


@dataclass(frozen=True, slots=True)
class FunctionalRegion(Region):
    """A region of [batch, sequence, hidden] activations, with functional collectives."""

    group: ProcessGroup
    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """See `Region.enter`."""
        if torch.is_autocast_enabled(x.device.type):
            # The region computes in this type anyway: convert once, before the communication.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return Region.enter(self, x)  # a dataclass with slots has no `super()`

    def gather(self, x: Tensor) -> Tensor:
        """See `Region.gather`."""
        return self.all_gather(x) if self.sequence_parallel else x.view_as(x)

    def reduce(self, x: Tensor) -> Tensor:
        """See `Region.reduce`."""
        return self.reduce_scatter(x) if self.sequence_parallel else self.all_reduce(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the group."""
        return wait(collectives.all_reduce(x.contiguous(), "sum", self.group))

    def all_reduce_with_gradient(self, x: Tensor) -> Tensor:
        """Return the sum over the group; the backward pass sums too, because ranks use the result differently."""
        summed: Tensor = _Sum.apply(x, self)  # type: ignore[no-untyped-call]
        return summed

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather all parts of the sequence."""
        parts = x.transpose(0, _SEQUENCE_DIMENSION).contiguous()
        gathered = wait(collectives.all_gather_tensor(parts, 0, self.group))
        return gathered.transpose(0, _SEQUENCE_DIMENSION).contiguous()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum over the group and return this rank's part of the sequence."""
        transposed = x.transpose(0, _SEQUENCE_DIMENSION).contiguous()
        part = wait(collectives.reduce_scatter_tensor(transposed, "sum", 0, self.group))
        return part.transpose(0, _SEQUENCE_DIMENSION).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return region.gather(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        region: Region = ctx.region
        return region.reduce(gradients[0]), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return region.reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        region: Region = ctx.region
        return region.gather(gradients[0]), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: FunctionalRegion) -> Tensor:
        ctx.region = region
        return region.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        region: FunctionalRegion = ctx.region
        return region.all_reduce(gradients[0]), None


def wait(x: Tensor) -> Tensor:
    """Wait for a functional collective and return its result."""
    return x.wait() if isinstance(x, collectives.AsyncCollectiveTensor) else x
