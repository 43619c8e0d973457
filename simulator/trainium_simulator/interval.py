"""Estimate how much training time a job loses for each interval between its durable saves.

The interval matters only for faults after which training resumed from the durable tier; the memory tier serves the
others. The simulation counts these rollbacks, and the loss follows from their rate.

Source: Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
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
"""Intervals in seconds that the report compares."""
_RULE_OF_THREE_EVENTS = 3.0
"""Upper limit (95 %) of the expected number of events if none was seen: the rule of three."""


@dataclass(frozen=True, slots=True)
class IntervalLoss:
    """The estimated loss with one interval between durable saves."""

    interval_seconds: float
    stall_share: float
    """Share of the time in which saves stall training."""
    repeated_share: float
    """Share of the time in which steps are repeated after rollbacks."""

    @property
    def total_share(self) -> float:
        """Return the sum of both shares, at most 1: the job then makes no progress."""
        return min(1.0, self.stall_share + self.repeated_share)


@dataclass(frozen=True, slots=True)
class Rollbacks:
    """Resumptions from the durable tier that repeat steps, over all simulated time."""

    count: int
    simulated_seconds: float

    @property
    def per_second(self) -> float:
        """Return the rate; without a rollback, the highest rate that the simulation does not exclude (95 %)."""
        return (self.count or _RULE_OF_THREE_EVENTS) / self.simulated_seconds if self.simulated_seconds > 0 else 0.0


def estimate_loss(interval_seconds: float, rollbacks: Rollbacks, stages: StageTimes) -> IntervalLoss:
    """Estimate the loss with a durable save each `interval_seconds`; a rollback repeats half of it and a save."""
    repeated_share = rollbacks.per_second * (interval_seconds / 2 + stages.save_seconds)
    return IntervalLoss(interval_seconds, stages.save_stall_seconds / interval_seconds, repeated_share)


def estimate_usual_losses(rollbacks: Rollbacks, stages: StageTimes) -> Sequence[IntervalLoss]:
    """Estimate the loss at each usual interval that is longer than a save."""
    return [estimate_loss(seconds, rollbacks, stages) for seconds in USUAL_INTERVALS if seconds > stages.save_seconds]


def compute_optimal_interval(rollbacks: Rollbacks, stages: StageTimes) -> float:
    """Return the interval in seconds with the least loss (Young's formula), at least the duration of a save.

    Infinite if no fault requires saves.
    """
    if not rollbacks.per_second:
        return math.inf
    return max(stages.save_seconds, math.sqrt(2 * stages.save_stall_seconds / rollbacks.per_second))


def find_configured_interval(spec: TrainingJobSpec, stages: StageTimes) -> float | None:
    """Return the job's interval of durable saves in seconds; None if it makes none while it trains."""
    durable = spec.checkpoint.durable
    seconds_of_steps = None if durable.every_steps is None else durable.every_steps * stages.step_seconds
    return min((seconds for seconds in (durable.every_seconds, seconds_of_steps) if seconds is not None), default=None)
