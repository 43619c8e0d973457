"""The optimizers: a module for each kind, which is found by its name.

A module `adamw` has `update`, see `Update`. Its kind and the names of its moments are in
`trainium_contract.trainer.optimizer`, from where layouts of the state, checkpoints and estimates of memory have them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainium_trainer.backends.rounding import noise_generator, noise_like, round_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from trainium_contract.trainer.optimizer import OptimizerConfig, OptimizerKind

_PIECE_VALUES = 1 << 22
"""Values whose float32 copies are alive at a time."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One stretch of the state: equally shaped tensors of this rank, float32, or bfloat16 but for the gradient."""

    weight: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    """In the order in which the optimizer's kind names them."""
    is_matrix: bool
    """Whether it is of parameters of two dimensions: what decays under every `WeightDecayScope`."""
    key: str = ""
    """Names the stretch for the noise of stochastic rounding; equal on ranks that hold the same values."""
    shared: bool = True
    """Whether other ranks may hold the same values."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding of float32 results into a state in bfloat16."""

    seed: int
    by_device: bool
    """Whether the device itself rounds at random whenever it converts, as a NeuronCore can; ranks would differ, so
    the values that they share are rounded here in any case."""


class Update(Protocol):
    """The update of an optimizer."""

    def __call__(
        self,
        slots: Iterable[Slot],
        config: OptimizerConfig,
        *,
        step: int,
        learning_rate: float,
        gradient_scale: float,
        rounding: Rounding | None = None,
    ) -> None:
        """Update all slots with the gradients times `gradient_scale`, in place; the gradients are overwritten.

        `step` counts updates from 1. `rounding` is needed where slots are in bfloat16.
        """
        ...


def find_update(kind: OptimizerKind) -> Update:
    """Return the update of a kind of optimizer."""
    update: Update = importlib.import_module(f"{__name__}.{kind.lower()}").update
    return update


def update_rounded(
    slot: Slot, rounding: Rounding, step: int, update: Callable[[Tensor, Tensor, Sequence[Tensor]], None]
) -> None:
    """Call `update` with float32 copies of weight, gradient and moments, a piece at a time, and round them back."""
    generator = noise_generator(rounding.seed, step, slot.key, slot.weight.device)
    state = [part.view(-1) for part in (slot.weight, *slot.moments)]
    for start in range(0, slot.weight.numel(), _PIECE_VALUES):
        targets = [part[start : start + _PIECE_VALUES] for part in state]
        results = [target.float() for target in targets]
        update(results[0], slot.gradient.view(-1)[start : start + _PIECE_VALUES], results[1:])
        if rounding.by_device and not slot.shared:
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)
            continue
        noise = noise_like(results[0], generator)
        for share, (target, result) in enumerate(zip(targets, results, strict=True)):
            round_into(target, result, noise, share=share)
