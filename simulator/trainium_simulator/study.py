"""Simulate the cases of a study with the same seeds, and derive their figures.

Guarantees:
- A seed gives the same faults in every case, as far as the cluster is the same.
- Figures are means over the seeds with the 95 % interval of the mean (Student's t).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass
from statistics import NormalDist, mean, median, stdev
from typing import TYPE_CHECKING, TypeVar

from trainium_contract.status.ledger import OVERHEAD
from trainium_simulator.interval import Rollbacks
from trainium_simulator.virtual.schedule import DAY, Fault, draw_faults
from trainium_simulator.virtual.simulation import Simulation, SimulationSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from trainium_contract.faults.causes import Cause
    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.status.interruptions import Interruption
    from trainium_simulator.stages import StageTimes
    from trainium_simulator.virtual.failures import FailureModel, Mix
    from trainium_simulator.virtual.result import SimulationResult

HOUR = 3600.0
MONTH = 30 * DAY
KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One variant of the job in a study, which all seeds simulate."""

    spec: TrainingJobSpec
    stages: StageTimes
    model: FailureModel
    mix: Mix
    days: float
    rate: float
    """Interruptions per 1,000 node-days; unused with a trace."""
    trace: tuple[Fault, ...] | None = None
    variation: str = ""
    shared_nodes: int = 0
    """Additional nodes, which other users need from time to time."""

    @property
    def nodes(self) -> int:
        """Nodes that train."""
        return self.spec.workers.replicas

    @property
    def spares(self) -> int:
        """Spare nodes."""
        return self.spec.workers.spares


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of a figure over the seeds, and half of its 95 % confidence interval (not a number for one seed)."""

    mean: float
    margin: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate the mean of one value per seed."""
        if len(values) < 2:
            return cls(values[0] if values else 0.0, math.nan)
        return cls(mean(values), _compute_student_t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStatistics:
    """Statistics of the interruptions of one cause, from the failure to the first new step."""

    cause: Cause
    per_day: float
    median_seconds: float
    p95_seconds: float
    longest_seconds: float
    max_steps_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of one case over all seeds; shares are from 0 to 1."""

    case: Case
    seeds: int
    strict_goodput: Estimate
    uptime: Estimate
    work_done: Estimate
    fleet_utilization: Estimate
    worst_day: float
    """Work done on the worst day of all seeds."""
    lost_by_cause: Mapping[str, float]
    """Lost share of the time, the largest first."""
    lost_by_stage: Mapping[str, float]
    """Lost share of the time, the largest first."""
    share_by_size: Mapping[int, float]
    """Share of the time at each size."""
    recoveries: tuple[RecoveryStatistics, ...]
    rollbacks: Rollbacks
    simulated_node_hours: float
    """Node-hours of all seeds, with spares and without shared nodes."""
    monthly_node_hours: float
    """Node-hours that the job held in a month of 30 days, spares included."""

    @property
    def largest_loss(self) -> str:
        """Return the stage with the greatest loss, or Overhead."""
        return next(iter(self.lost_by_stage), OVERHEAD)


def simulate_seed(case: Case, seed: int) -> SimulationResult:
    """Simulate a case with the faults and lemons that this seed draws."""
    slots = case.nodes + case.spares + case.shared_nodes
    faults = case.trace
    if faults is None:
        faults = draw_faults(
            seed,
            slots=slots,
            days=case.days,
            rate=case.rate,
            mix=case.mix,
            model=case.model,
            shared_nodes=case.shared_nodes,
        )
    lemons = frozenset(
        slot
        for slot in range(slots)
        if random.Random(f"{seed}/{slot}/lemon").random() < case.model.lemon_share  # noqa: S311 - a simulation
    )
    settings = SimulationSettings(
        spec=case.spec, stages=case.stages, model=case.model, days=case.days, shared_nodes=case.shared_nodes
    )
    return Simulation(settings, lemons=lemons).run(faults)


def run_study(case: Case, seeds: int, *, on_seed_done: Callable[[], None] = lambda: None) -> Result:
    """Simulate all seeds of a case; call `on_seed_done()` after each."""
    results = []
    for seed in range(seeds):
        results.append(simulate_seed(case, seed))
        on_seed_done()
    wall_seconds = sum(result.wall_seconds for result in results) or 1.0
    size_seconds = sum(sum(result.seconds_by_size.values()) for result in results) or 1.0
    share_by_size = _sum_shares((result.seconds_by_size for result in results), size_seconds)
    interruptions = [entry for result in results for entry in result.interruptions]
    return Result(
        case=case,
        seeds=seeds,
        strict_goodput=Estimate.of([result.strict_goodput for result in results]),
        uptime=Estimate.of([result.uptime for result in results]),
        work_done=Estimate.of([result.work_done for result in results]),
        fleet_utilization=Estimate.of([result.compute_fleet_utilization(case.nodes) for result in results]),
        worst_day=min(result.worst_day for result in results),
        lost_by_cause=_sum_shares((result.lost_by_cause for result in results), wall_seconds),
        lost_by_stage=_sum_shares((result.lost_by_stage for result in results), wall_seconds),
        share_by_size=dict(sorted(share_by_size.items(), reverse=True)),
        recoveries=_summarize_recoveries(interruptions, seeds * case.days),
        rollbacks=Rollbacks(sum(result.rollbacks for result in results), wall_seconds),
        simulated_node_hours=seeds * case.days * 24 * (case.nodes + case.spares),
        monthly_node_hours=mean(result.ledger.node_seconds for result in results) / HOUR * MONTH / (case.days * DAY),
    )


def compute_spare_gain(before: Result, after: Result) -> tuple[float, float]:
    """Return the node-hours a month of 30 days that the additional spares of `after` gain and hold."""
    hours = MONTH / HOUR
    gain = (after.work_done.mean - before.work_done.mean) * after.case.nodes * hours
    return gain, (after.case.spares - before.case.spares) * hours


def _sum_shares(parts: Iterable[Mapping[KeyT, float]], total: float) -> dict[KeyT, float]:
    sums: dict[KeyT, float] = defaultdict(float)
    for part in parts:
        for key, seconds in part.items():
            sums[key] += seconds
    return {key: seconds / total for key, seconds in sorted(sums.items(), key=lambda item: -item[1])}


def _summarize_recoveries(interruptions: Sequence[Interruption], days: float) -> tuple[RecoveryStatistics, ...]:
    by_cause: dict[Cause, list[Interruption]] = defaultdict(list)
    for entry in interruptions:
        by_cause[entry.cause].append(entry)
    statistics = []
    for cause, recoveries in by_cause.items():
        seconds = sorted(entry.recovered_seconds for entry in recoveries if entry.recovered_seconds is not None)
        if seconds:
            statistics.append(
                RecoveryStatistics(
                    cause=cause,
                    per_day=len(recoveries) / days,
                    median_seconds=median(seconds),
                    p95_seconds=seconds[min(len(seconds) - 1, math.ceil(0.95 * len(seconds)) - 1)],
                    longest_seconds=seconds[-1],
                    max_steps_lost=max(entry.steps_lost or 0 for entry in recoveries),
                )
            )
    return tuple(sorted(statistics, key=lambda statistic: -statistic.per_day))


def _compute_student_t_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5 % point of Student's t.

    Exact below five degrees of freedom, else by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).
    """
    exact = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
    if degrees_of_freedom in exact:
        return exact[degrees_of_freedom]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees_of_freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees_of_freedom**2)
