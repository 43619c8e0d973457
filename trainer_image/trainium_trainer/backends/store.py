"""Where a rank's weights, gradients and moments live: the interface of the two data-parallel layouts.

Invariants: all values are float32 (lower precision exists only inside forward and backward); `slots` and `locals` alias
the live state; names are those of `models.state_dict`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from trainium_trainer.backends.adamw import Slot


class Store(Protocol):
    """One layout of the training state."""

    def before_backward(self, *, last: bool) -> None:
        """Say whether the coming backward pass is the last one of the step."""
        ...

    def reduce(self) -> None:
        """Finish the sum of the gradients over the data-parallel ranks. Collective."""
        ...

    def square_sums(self) -> tuple[float, float]:
        """Sums of squared gradients on this rank: of what tensor parallelism divides, and of what it repeats."""
        ...

    def slots(self) -> Iterable[Slot]:
        """What the optimizer updates."""
        ...

    def forget(self) -> None:
        """Drop the gradients."""
        ...

    def parameters(self) -> Iterable[tuple[str, torch.Size, Tensor, tuple[tuple[int, int, int], ...]]]:
        """Name, full size, this rank's part, and how to cut that part from the whole (see `cut`)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """See `TrainState.state_dict`."""
        ...

    def local_tensors(self) -> dict[str, Tensor]:
        """See `TrainState.local_tensors`."""
        ...


def cut(whole: Tensor, cuts: tuple[tuple[int, int, int], ...]) -> Tensor:
    """A rank's part of a whole tensor: for each (dimension, pieces, index) in turn, keep one piece, as DTensor does."""
    for dimension, pieces, index in cuts:
        chunks = whole.chunk(pieces, dim=dimension)
        # Like DTensor: when there are fewer rows than pieces, the last ranks hold nothing.
        whole = chunks[index] if index < len(chunks) else whole.narrow(dimension, 0, 0)
    return whole


def is_dtensor(value: Any) -> bool:
    """Whether a tensor is divided; asks without importing DTensor, which takes more than a second."""
    return type(value).__name__ == "DTensor"


def local_of(value: Any) -> Tensor:
    """The plain tensor of this rank behind a tensor or DTensor, sharing its memory."""
    tensor = value.detach()
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


def square_sum(tensors: Iterable[Tensor]) -> float:
    """Sum of squares of many float32 tensors, added up in double precision."""
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return float(torch.stack(norms).double().square().sum()) if norms else 0.0
