"""The learning rate of every step: linear warm-up, then decay to a floor. Pure functions of a run's progress."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainium_contract.trainer.optimizer import ScheduleConfig, ScheduleKind

if TYPE_CHECKING:
    from trainium_contract.trainer.config import TrainingConfig


def compute_learning_rate(config: TrainingConfig, step: float) -> float:
    """Return the learning rate of the update that completes step `step + 1` (`step` counts completed steps, from 0).

    The last step of the warm-up has the peak, the last step of the decay has `finalRatio` of it. Where steps differ in
    size, `step` counts global batches and may be fractional.
    """
    return config.optimizer.learning_rate * compute_rate_factor(config.schedule, steps=config.steps, step=step)


def compute_rate_factor(schedule: ScheduleConfig, *, steps: int, step: float) -> float:
    """Return the learning rate as a fraction of the peak, 0 to 1, in a run of `steps` steps."""
    warmup = schedule.warmup_steps
    if step + 1 <= warmup:
        return (step + 1) / warmup
    done = _decay_fraction(schedule, steps=steps, step=step)
    match schedule.kind:
        case ScheduleKind.COSINE:
            fraction = 0.5 * (1.0 + math.cos(math.pi * done))
        case ScheduleKind.LINEAR | ScheduleKind.WARMUP_STABLE_DECAY:
            fraction = 1.0 - done
        case ScheduleKind.CONSTANT:
            return 1.0
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * fraction


def _decay_fraction(schedule: ScheduleConfig, *, steps: int, step: float) -> float:
    """Return the completed fraction of the decay after the update that completes step `step + 1`, 0 to 1."""
    after_warmup = max(1, steps - schedule.warmup_steps)
    if schedule.kind is ScheduleKind.WARMUP_STABLE_DECAY:
        length = schedule.decay_steps or max(1, min(steps // 10, after_warmup))
        begins = steps - length
    else:
        length = schedule.decay_steps or after_warmup
        begins = schedule.warmup_steps
    return min(1.0, max(0.0, (step + 1 - begins) / length))
