"""AdamW with decoupled decay, in place on plain tensors: the same arithmetic for every layout of the state.

Own code because `torch.optim` imports the compiler stack at its first step, which a restart would pay for, and because
moments must exist before the first step so that a checkpoint can be loaded into them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from trainium_contract.trainer import OptimizerConfig


@dataclass(frozen=True, slots=True)
class Slot:
    """One stretch of the state: equally shaped float32 tensors of this rank."""

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@torch.no_grad()
def adamw(
    slots: Iterable[Slot], config: OptimizerConfig, *, step: int, learning_rate: float, gradient_scale: float
) -> None:
    """Update number `step` (from 1) of all slots; gradients are multiplied by `gradient_scale` in place first."""
    correction = 1.0 - config.beta1**step
    root_correction = math.sqrt(1.0 - config.beta2**step)
    for slot in slots:
        gradient = slot.gradient.mul_(gradient_scale)
        slot.exp_avg.lerp_(gradient, 1.0 - config.beta1)
        slot.exp_avg_sq.mul_(config.beta2).addcmul_(gradient, gradient, value=1.0 - config.beta2)
        slot.weight.mul_(1.0 - learning_rate * config.weight_decay)
        denominator = slot.exp_avg_sq.sqrt().div_(root_correction).add_(config.eps)
        slot.weight.addcdiv_(slot.exp_avg, denominator, value=-learning_rate / correction)
