"""The interface of the two data-parallel layouts of a rank's weights, gradients and moments.

Guarantees:
- Sums of gradients are float32, as are weights and moments unless the precision keeps them in bfloat16.
- `slots` and `locals` alias the live state.
- `models.state_dict` defines the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from trainium_trainer.backends.optimizers import Slot

_PIECE = 1 << 14
"""The number of values that are summed in float32."""


class StateStore(Protocol):
    """A layout of the training state."""

    def begin_backward(self, passes: int) -> None:
        """Set the number of backward passes until the step's gradients are complete; 0 if unknown."""
        ...

    def accumulate(self) -> None:
        """Accumulate the gradients of a backward pass; called after each."""
        ...

    def reduce(self) -> None:
        """Finish the sum of the gradients over the data-parallel ranks. Collective."""
        ...

    def has_finite_own_gradients(self) -> bool:
        """Return whether this rank's gradients were finite before they were summed with those of other ranks."""
        ...

    def square_sums(self) -> tuple[float, float]:
        """Return sums of squared gradients on this rank: of divided and of repeated parameters.

        The first stage of a pipeline counts the weight that the last stage shares with it.
        """
        ...

    def weight_square_sums(self) -> tuple[float, float]:
        """Return the sums of squared weights, as `square_sums`."""
        ...

    def gradient(self, name: str) -> Tensor:
        """Return this rank's part of the gradient of one parameter, aliasing it."""
        ...

    def slots(self) -> Iterable[Slot]:
        """Yield the slots that the optimizer updates."""
        ...

    def zero_grad(self) -> None:
        """Zero or free the gradients."""
        ...

    def after_evaluation(self) -> None:
        """Release the memory that only passes without gradients needed."""
        ...

    def parameters(self) -> Iterable[tuple[str, torch.Size, Tensor, tuple[tuple[int, int, int], ...]]]:
        """Yield name, full size, this rank's part and its cuts (see `cut`) of each trained parameter."""
        ...

    def frozen(self) -> Iterable[tuple[str, torch.Size, Tensor, tuple[tuple[int, int, int], ...]]]:
        """Yield the same for frozen parameters, which are neither in the state nor in the slots."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """See `TrainingState.state_dict`."""
        ...

    def local_tensors(self) -> dict[str, Tensor]:
        """See `TrainingState.local_tensors`."""
        ...


def cut(whole: Tensor, cuts: tuple[tuple[int, int, int], ...]) -> Tensor:
    """Return a rank's part of a whole tensor as DTensor does: keep one piece for each (dimension, pieces, index)."""
    for dimension, pieces, index in cuts:
        chunks = whole.chunk(pieces, dim=dimension)
        # As in DTensor, the last ranks hold nothing if there are fewer rows than pieces.
        whole = chunks[index] if index < len(chunks) else whole.narrow(dimension, 0, 0)
    return whole


def box(size: torch.Size, cuts: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets in the whole and the size of the part that `cut` keeps."""
    offsets, sizes = [0] * len(size), list(size)
    for dimension, pieces, index in cuts:
        length = -(-sizes[dimension] // pieces)
        begin = min(index * length, sizes[dimension])
        offsets[dimension] += begin
        sizes[dimension] = min(length, sizes[dimension] - begin)
    return tuple(offsets), tuple(sizes)


def square_sum(tensors: Iterable[Tensor]) -> float:
    """Return the sum of squares of tensors: pieces in float32 on the device, their sum in double on the host.

    A processor sums a whole tensor in a few running float32 sums, with an error of 4e-3 at 50 million values, and not
    every device supports double precision.
    """
    norms = [norm for tensor in tensors for norm in _norms(tensor.reshape(-1))]
    return float(torch.cat(norms).cpu().double().square().sum()) if norms else 0.0


def _norms(flat: Tensor) -> list[Tensor]:
    """Return the norms of the pieces of a flat tensor, float32."""
    whole = flat.numel() // _PIECE * _PIECE
    norms = []
    if whole:
        norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, _PIECE), dim=1, dtype=torch.float32))
    if whole < flat.numel():
        norms.append(torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).view(1))
    return norms
