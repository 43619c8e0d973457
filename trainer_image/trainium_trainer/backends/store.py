"""Where a rank's weights, gradients and moments live: the interface of the two data-parallel layouts.

Guarantees:
- Sums of gradients are float32, weights and moments too unless the precision keeps them in bfloat16.
- `slots` and `locals` alias the live state.
- Names are those of `models.state_dict`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from trainium_trainer.backends.optimizers import Slot

_PIECE = 1 << 14
"""Values that are summed in float32."""


class StateStore(Protocol):
    """One layout of the training state."""

    def begin_backward(self, passes: int) -> None:
        """Set how many more backward passes complete the step's gradients; 0 when that is not known yet."""
        ...

    def accumulate(self) -> None:
        """Take over what backward passes have left; called after each."""
        ...

    def reduce(self) -> None:
        """Finish the sum of the gradients over the data-parallel ranks. Collective."""
        ...

    def has_finite_own_gradients(self) -> bool:
        """Return whether this rank's gradients were finite before they were summed with those of other ranks."""
        ...

    def square_sums(self) -> tuple[float, float]:
        """Return sums of squared gradients on this rank: of what tensor parallelism divides, and of what it repeats.

        What a pipeline's last stage shares with the first is left to that one.
        """
        ...

    def weight_square_sums(self) -> tuple[float, float]:
        """Return the same of the weights."""
        ...

    def gradient(self, name: str) -> Tensor:
        """Return this rank's part of the gradient of one parameter, aliasing it."""
        ...

    def slots(self) -> Iterable[Slot]:
        """Return what the optimizer updates."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...

    def after_evaluation(self) -> None:
        """Release what only passes without gradients needed."""
        ...

    def parameters(self) -> Iterable[tuple[str, torch.Size, Tensor, tuple[tuple[int, int, int], ...]]]:
        """Yield of each trained parameter: name, full size, this rank's part, its cuts from the whole (see `cut`)."""
        ...

    def frozen(self) -> Iterable[tuple[str, torch.Size, Tensor, tuple[tuple[int, int, int], ...]]]:
        """Return the same of what is not trained, and so is neither in the state nor in the slots."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """See `TrainingState.state_dict`."""
        ...

    def local_tensors(self) -> dict[str, Tensor]:
        """See `TrainingState.local_tensors`."""
        ...


def cut(whole: Tensor, cuts: tuple[tuple[int, int, int], ...]) -> Tensor:
    """Return a rank's part of a whole tensor: for each (dimension, pieces, index) in turn, keep one piece.

    As DTensor does.
    """
    for dimension, pieces, index in cuts:
        chunks = whole.chunk(pieces, dim=dimension)
        # Like DTensor: when there are fewer rows than pieces, the last ranks hold nothing.
        whole = chunks[index] if index < len(chunks) else whole.narrow(dimension, 0, 0)
    return whole


def box(size: torch.Size, cuts: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the part that `cut` keeps begins in the whole, and its size."""
    offsets, sizes = [0] * len(size), list(size)
    for dimension, pieces, index in cuts:
        length = -(-sizes[dimension] // pieces)
        begin = min(index * length, sizes[dimension])
        offsets[dimension] += begin
        sizes[dimension] = min(length, sizes[dimension] - begin)
    return tuple(offsets), tuple(sizes)


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is divided, without importing DTensor, which takes more than a second."""
    return type(value).__name__ == "DTensor"


def local_of(value: Any) -> Tensor:
    """Return the plain tensor of this rank behind a tensor or DTensor, sharing its memory."""
    tensor = value.detach()
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


def square_sum(tensors: Iterable[Tensor]) -> float:
    """Sum of squares of many tensors: pieces are summed in float32 on the device, all pieces in double on the host.

    A processor adds a whole tensor up in a few running sums of float32: 4e-3 too little at 50 million values. And not
    every device has double precision.
    """
    norms = [norm for tensor in tensors for norm in _norms(tensor.reshape(-1))]
    return float(torch.cat(norms).cpu().double().square().sum()) if norms else 0.0


def _norms(flat: Tensor) -> list[Tensor]:
    """Norms of the pieces of a flat tensor, float32."""
    whole = flat.numel() // _PIECE * _PIECE
    found = []
    if whole:
        found.append(torch.linalg.vector_norm(flat[:whole].view(-1, _PIECE), dim=1, dtype=torch.float32))
    if whole < flat.numel():
        found.append(torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).view(1))
    return found
