"""Where a rank's weights, gradients and moments live: the interface of the two data-parallel layouts.

Invariants: sums of gradients are float32, weights and moments too unless the precision keeps them in bfloat16; `slots`
and `locals` alias the live state; names are those of `models.state_dict`.
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

    def expect(self, passes: int) -> None:
        """Say how many more backward passes complete the step's gradients; 0 when that is not known yet."""
        ...

    def absorb(self) -> None:
        """Take over what backward passes have left; called after each."""
        ...

    def reduce(self) -> None:
        """Finish the sum of the gradients over the data-parallel ranks. Collective."""
        ...

    def square_sums(self) -> tuple[float, float]:
        """Sums of squared gradients on this rank: of what tensor parallelism divides, and of what it repeats.

        What a pipeline's last stage shares with the first is left to that one.
        """
        ...

    def weight_square_sums(self) -> tuple[float, float]:
        """The same of the weights."""
        ...

    def gradient(self, name: str) -> Tensor:
        """This rank's part of the gradient of one parameter, aliasing it."""
        ...

    def slots(self) -> Iterable[Slot]:
        """What the optimizer updates."""
        ...

    def forget(self) -> None:
        """Drop the gradients."""
        ...

    def after_evaluation(self) -> None:
        """Passes without gradients have ended: let go of what only they needed."""
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
    """Sum of squares of many tensors, each summed in float32, added up in double precision."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return float(torch.stack(norms).double().square().sum()) if norms else 0.0
