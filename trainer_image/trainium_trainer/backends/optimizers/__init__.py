"""The optimizers: one module per kind, found by its name.

A module such as `adamw` has `update`, see `Update`. `trainium_contract.trainer.optimizer` has the kinds and the names
of moments for the layouts of the state, checkpoints and memory estimates.

With stochastic rounding, weights can be kept only in bfloat16: an update smaller than half the distance to the next
number, which rounding to nearest would always lose, is applied with a probability proportional to its size (arXiv
1502.02551; arXiv 2010.06192 for bfloat16 weights), so that the mean of many roundings is the value.

Guarantees:
- The noise is a function of seed, step and key, so that ranks with the same value round it equally.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from trainium_contract.trainer.optimizer import OptimizerConfig, OptimizerKind

_PIECE_VALUES = 1 << 22
"""The number of values whose float32 copies exist at a time."""
_LOW_BITS = 16
"""The bits of a float32 that a bfloat16 lacks."""
_MASK = (1 << _LOW_BITS) - 1


@dataclass(frozen=True, slots=True)
class Slot:
    """A range of the state: equally shaped tensors of this rank, in float32, or in bfloat16 except the gradient."""

    weight: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    """The moments in the order of the optimizer's kind."""
    is_matrix: bool
    """Whether the parameters have two dimensions, which decay under every `WeightDecayScope`."""
    key: str = ""
    """The key of the noise of stochastic rounding; equal on ranks that hold the same values."""
    shared: bool = True
    """Whether other ranks may hold the same values."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding of float32 results into a state in bfloat16."""

    seed: int
    by_device: bool
    """Whether the device rounds stochastically at every conversion, as a NeuronCore can. Ranks would differ, so values
    that they share are always rounded here.
    """


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
    """Return the update function of a kind of optimizer."""
    update: Update = importlib.import_module(f"{__name__}.{kind.lower()}").update
    return update


def update_rounded(
    slot: Slot, rounding: Rounding, step: int, update: Callable[[Tensor, Tensor, Sequence[Tensor]], None]
) -> None:
    """Call `update` on float32 copies of weight, gradient and moments, piece by piece, and round the results."""
    generator = create_noise_generator(rounding.seed, step, slot.key, slot.weight.device)
    state = [part.view(-1) for part in (slot.weight, *slot.moments)]
    for start in range(0, slot.weight.numel(), _PIECE_VALUES):
        targets = [part[start : start + _PIECE_VALUES] for part in state]
        results = [target.float() for target in targets]
        update(results[0], slot.gradient.view(-1)[start : start + _PIECE_VALUES], results[1:])
        if rounding.by_device and not slot.shared:
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)
            continue
        noise = draw_noise_like(results[0], generator)
        for share, (target, result) in enumerate(zip(targets, results, strict=True)):
            round_into(target, result, noise, share=share)


def create_noise_generator(seed: int, step: int, key: str, device: torch.device) -> torch.Generator:
    """Create the generator of the noise of one value at one step."""
    digest = hashlib.blake2b(f"{seed}:{step}:{key}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_noise_like(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return random int64 numbers of the shape of `value`, enough for three roundings of it."""
    return torch.empty(value.shape, dtype=torch.int64, device=value.device).random_(generator=generator)


def round_into(target: Tensor, value: Tensor, noise: Tensor, *, share: int) -> None:
    """Write float32 `value` to bfloat16 `target`; `share` (0, 1 or 2) chooses the bits of `noise` to use.

    Uniform noise added to the bits that are cut off carries into the kept bits with the right probability, because
    floats of one sign are ordered like their bits. Infinities and NaN do not change.
    """
    bits = (noise >> (_LOW_BITS * share)).bitwise_and_(_MASK).to(torch.int32)
    bits.add_(value.view(torch.int32)).bitwise_and_(~_MASK)
    rounded = bits.view(torch.float32)
    target.copy_(torch.where(value.isfinite(), rounded, value))
