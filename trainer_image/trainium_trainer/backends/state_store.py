"""The interface of the two data-parallel layouts of a rank's weights, gradients and moments.

Guarantees:
- Sums of gradients are float32, as are weights and moments unless the precision keeps them in bfloat16.
- `iterate_slots` and the tensors of `iterate_parameters` alias the live state.
- `models.state_dict` defines the names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainium_trainer.checkpoint.format.live_state import is_dtensor, to_local

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from trainium_trainer.backends.optimizers import Slot
    from trainium_trainer.checkpoint.sharding import Box

_FLOAT32_SUM_VALUES = 1 << 14
"""The number of values that are summed in float32."""


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """This rank's part of a parameter."""

    name: str
    size: torch.Size
    """The size of the whole parameter."""
    local: Tensor
    box: Box
    """The box of the whole parameter that this rank holds; empty where there are fewer rows than ranks."""

    def slice_whole(self, whole: Tensor) -> Tensor:
        """Return the values of a whole tensor that this rank holds."""
        for dimension, (offset, size) in enumerate(zip(self.box.offsets, self.box.sizes, strict=True)):
            whole = whole.narrow(dimension, offset, size)
        return whole


class StateStore(Protocol):
    """A layout of the training state, by checkpoint names."""

    step: Tensor
    """The number of updates, int64."""

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

    def sum_gradient_squares(self) -> tuple[float, float]:
        """Return sums of squared gradients on this rank: of divided and of repeated parameters.

        The first stage of a pipeline counts the weight that the last stage shares with it.
        """
        ...

    def sum_weight_squares(self) -> tuple[float, float]:
        """Return the sums of squared weights, as `sum_gradient_squares`."""
        ...

    def find_gradient(self, name: str) -> Tensor:
        """Return this rank's part of the gradient of one parameter, aliasing it."""
        ...

    def iterate_slots(self) -> Iterable[Slot]:
        """Yield the slots that the optimizer updates."""
        ...

    def zero_grad(self) -> None:
        """Zero or free the gradients."""
        ...

    def free_evaluation_memory(self) -> None:
        """Release the memory that only passes without gradients needed."""
        ...

    def iterate_parameters(self) -> Iterable[LocalParameter]:
        """Yield this rank's part of each trained parameter."""
        ...

    def iterate_frozen(self) -> Iterable[LocalParameter]:
        """Yield this rank's part of each frozen parameter, which is neither in the state nor in the slots."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """See `TrainingState.state_dict`."""
        ...

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy every value; the names must be exactly this state's."""
        live = self.state_dict()
        if live.keys() != state.keys():
            raise KeyError(sorted(live.keys() ^ state.keys()))
        for name, value in live.items():
            loaded = state[name]
            target = to_local(value)
            source = to_local(loaded) if is_dtensor(loaded) == is_dtensor(value) else loaded
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

    def list_local_tensors(self) -> dict[str, Tensor]:
        """See `TrainingState.list_local_tensors`."""
        ...


def sum_squares(tensors: Iterable[Tensor]) -> float:
    """Return the sum of squares of tensors: pieces in float32 on the device, their sum in double on the host.

    A processor sums a whole tensor in a few running float32 sums, with an error of 4e-3 at 50 million values, and not
    every device supports double precision.
    """
    norms = [norm for tensor in tensors for norm in _compute_norms(tensor.reshape(-1))]
    return float(torch.cat(norms).cpu().double().square().sum()) if norms else 0.0


def _compute_norms(flat: Tensor) -> list[Tensor]:
    """Return the norms of the pieces of a flat tensor, float32."""
    full_rows = flat.numel() // _FLOAT32_SUM_VALUES * _FLOAT32_SUM_VALUES
    norms = []
    if full_rows:
        norms.append(
            torch.linalg.vector_norm(flat[:full_rows].view(-1, _FLOAT32_SUM_VALUES), dim=1, dtype=torch.float32)
        )
    if full_rows < flat.numel():
        norms.append(torch.linalg.vector_norm(flat[full_rows:], dtype=torch.float32).view(1))
    return norms
