"""The learning rate of every step: linear warm-up, then a cosine down to a floor. A pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.trainer import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Learning rate of the update that completes step `step + 1` (`step` counts completed steps, from 0).

    The last step of the warm-up has the peak, the last step of the run has `finalRatio` of it.
    """
    peak = config.optimizer.learning_rate
    warmup = config.schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step + 1 - warmup) / max(1, config.steps - warmup))
    floor = config.schedule.final_ratio
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done)))
