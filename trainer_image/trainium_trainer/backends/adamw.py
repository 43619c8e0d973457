"""AdamW with decoupled decay, in place on plain tensors: the same arithmetic for every layout of the state.

Own code because `torch.optim` imports the compiler stack at its first step, which a restart would pay for, and because
moments must exist before the first step so that a checkpoint can be loaded into them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainium_contract.trainer.optimizer import WeightDecayScope
from trainium_trainer.backends.rounding import noise_generator, noise_like, round_into

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from trainium_contract.trainer.optimizer import OptimizerConfig


_FUSED = frozenset({"cpu", "cuda"})
"""Devices for which torch has a kernel that does all of it."""
_PIECE_VALUES = 1 << 22
"""Values whose float32 copies are alive at a time."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One stretch of the state: equally shaped tensors of this rank, float32, or bfloat16 but for the gradient."""

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    is_matrix: bool
    """Whether it is of parameters of two dimensions: what decays under every `WeightDecayScope`."""
    key: str = ""
    """Names the stretch for the noise of stochastic rounding; equal on ranks that hold the same values."""
    shared: bool = True
    """Whether other ranks may hold the same values."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How float32 results get into a state in bfloat16."""

    seed: int
    by_device: bool
    """Whether the device itself rounds at random whenever it converts, as a NeuronCore can; ranks would differ, so
    what they share is rounded by us in any case."""


@torch.no_grad()
def adamw(
    slots: Iterable[Slot],
    config: OptimizerConfig,
    *,
    step: int,
    learning_rate: float,
    gradient_scale: float,
    rounding: Rounding | None = None,
) -> None:
    """Update number `step` (from 1) of all slots with the gradients times `gradient_scale`; it overwrites them.

    AdamW of arXiv 1711.05101, algorithm 2. `rounding` is needed where slots are in bfloat16.
    """
    fused: dict[bool, list[Slot]] = {True: [], False: []}
    for slot in slots:
        decays = slot.is_matrix or config.decay_scope is WeightDecayScope.ALL
        kept = 1.0 - learning_rate * config.weight_decay if decays else 1.0
        if rounding is not None:
            slot.gradient.mul_(gradient_scale)
            _update_rounded(slot, config, rounding, step=step, learning_rate=learning_rate, kept=kept)
        elif slot.weight.device.type in _FUSED:
            if slot.weight.numel():
                fused[decays].append(slot)
        else:
            slot.gradient.mul_(gradient_scale)
            parts = (slot.weight, slot.gradient, slot.exp_avg, slot.exp_avg_sq)
            _update(*parts, config, step=step, learning_rate=learning_rate, kept=kept)
    for decays, group in fused.items():
        decay = config.weight_decay if decays else 0.0
        _update_fused(group, config, decay, step=step, learning_rate=learning_rate, gradient_scale=gradient_scale)


def _update_fused(
    group: list[Slot],
    config: OptimizerConfig,
    decay: float,
    *,
    step: int,
    learning_rate: float,
    gradient_scale: float,
) -> None:
    """The same in one pass over memory, by torch's own kernel: a quarter of the time on a CPU."""
    if not group:
        return
    device = group[0].weight.device
    torch._fused_adamw_(
        [slot.weight for slot in group],
        [slot.gradient for slot in group],
        [slot.exp_avg for slot in group],
        [slot.exp_avg_sq for slot in group],
        [],
        [torch.tensor(float(step), device=device)] * len(group),
        lr=learning_rate,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.tensor(1.0 / gradient_scale, device=device),
        found_inf=None,
    )


def _update(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    config: OptimizerConfig,
    *,
    step: int,
    learning_rate: float,
    kept: float,
) -> None:
    """The arithmetic, in place on float32; `kept` is what decay leaves of the weight."""
    correction = 1.0 - config.beta1**step
    root_correction = math.sqrt(1.0 - config.beta2**step)
    exp_avg.lerp_(gradient, 1.0 - config.beta1)
    exp_avg_sq.mul_(config.beta2).addcmul_(gradient, gradient, value=1.0 - config.beta2)
    weight.mul_(kept)
    denominator = exp_avg_sq.sqrt().div_(root_correction).add_(config.eps)
    weight.addcdiv_(exp_avg, denominator, value=-learning_rate / correction)


def _update_rounded(
    slot: Slot, config: OptimizerConfig, rounding: Rounding, *, step: int, learning_rate: float, kept: float
) -> None:
    """The same in float32 copies of one piece after the other, rounded back."""
    generator = noise_generator(rounding.seed, step, slot.key, slot.weight.device)
    flat = (slot.weight.view(-1), slot.gradient.view(-1), slot.exp_avg.view(-1), slot.exp_avg_sq.view(-1))
    for start in range(0, slot.weight.numel(), _PIECE_VALUES):
        weight, gradient, exp_avg, exp_avg_sq = (part[start : start + _PIECE_VALUES] for part in flat)
        results = (weight.float(), exp_avg.float(), exp_avg_sq.float())
        _update(results[0], gradient, results[1], results[2], config, step=step, learning_rate=learning_rate, kept=kept)
        targets = (weight, exp_avg, exp_avg_sq)
        if rounding.by_device and not slot.shared:
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)
            continue
        noise = noise_like(results[0], generator)
        for share, (target, result) in enumerate(zip(targets, results, strict=True)):
            round_into(target, result, noise, share=share)
