"""Checkpoint interval against loss: what the interval of durable saves costs and saves in this job.

Invariant: a fault costs by the interval only when training went on from the durable tier. The memory tier answers the
others, whatever the interval is; so the rollbacks are counted in the simulation, and the rest is arithmetic.

Source of the arithmetic: Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.job import TrainingJobSpec
    from trainium_simulator.stages import StageTimes

USUAL_INTERVALS = (60.0, 300.0, 900.0, 3600.0, 14400.0)
"""Seconds; what people choose between."""
_NONE_SEEN = 3.0
"""Events that none seen leaves possible, with 95 % (the rule of three)."""


@dataclass(frozen=True, slots=True)
class IntervalLoss:
    """One interval between durable saves."""

    seconds: float
    stall: float
    """Share of the time that the saves take from training."""
    repeated: float
    """Share of the time for steps that are made a second time."""

    @property
    def total(self) -> float:
        """Both; 1 where the job makes no progress."""
        return min(1.0, self.stall + self.repeated)


@dataclass(frozen=True, slots=True)
class Rollbacks:
    """Counts of resumptions from the durable tier."""

    seen: int
    seconds: float
    """That were simulated."""

    @property
    def per_second(self) -> float:
        """Their rate; where none was seen, the highest that the simulation does not exclude."""
        return (self.seen or _NONE_SEEN) / self.seconds if self.seconds > 0 else 0.0


def loss(seconds: float, rollbacks: Rollbacks, stages: StageTimes) -> IntervalLoss:
    """Return what saves every so many seconds cost: half an interval and the save itself are lost at a rollback."""
    again = rollbacks.per_second * (seconds / 2 + stages.save_seconds)
    return IntervalLoss(seconds, stages.save_stall_seconds / seconds, again)


def losses(rollbacks: Rollbacks, stages: StageTimes) -> Sequence[IntervalLoss]:
    """Return the usual intervals that leave time for a save."""
    return [loss(each, rollbacks, stages) for each in USUAL_INTERVALS if each > stages.save_seconds]


def best_interval(rollbacks: Rollbacks, stages: StageTimes) -> float:
    """Return seconds at which the loss is least, never less than the duration of a save.

    Infinite when nothing calls for saves.
    """
    if not rollbacks.per_second:
        return math.inf
    return max(stages.save_seconds, math.sqrt(2 * stages.save_stall_seconds / rollbacks.per_second))


def present_interval(spec: TrainingJobSpec, stages: StageTimes) -> float | None:
    """Return seconds between durable saves as the job has them; None when it makes none while it trains."""
    durable = spec.checkpoint.durable
    by_steps = None if durable.every_steps is None else durable.every_steps * stages.step_seconds
    return min((each for each in (durable.every_seconds, by_steps) if each is not None), default=None)
