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

from trainium_simulator.interval import Rollbacks
from trainium_simulator.virtual.schedule import DAY, Fault, draw
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
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One column of a study."""

    spec: TrainingJobSpec
    stages: StageTimes
    model: FailureModel
    mix: Mix
    days: float
    rate: float
    """Interruptions per 1,000 node-days; unused with a trace."""
    trace: tuple[Fault, ...] | None = None
    variation: str = ""
    shared: int = 0
    """Further nodes, which others use from time to time."""

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
    """A mean over the seeds, and half of its 95 % interval."""

    mean: float
    margin: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate the mean of one value per seed."""
        if len(values) < 2:
            return cls(values[0] if values else 0.0, math.nan)
        return cls(mean(values), _student(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoveries:
    """Interruptions of one cause."""

    cause: Cause
    per_day: float
    median: float
    slow: float
    """95th percentile."""
    longest: float
    steps_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one case."""

    case: Case
    seeds: int
    strict: Estimate
    uptime: Estimate
    work: Estimate
    fleet: Estimate
    worst_day: float
    """Worst day of all seeds."""
    by_cause: Mapping[str, float]
    """Lost share of the time, the greatest first."""
    by_stage: Mapping[str, float]
    sizes: Mapping[int, float]
    """Share of the time at each size."""
    recoveries: tuple[Recoveries, ...]
    rollbacks: Rollbacks
    node_hours: float
    """Simulated node-hours."""
    held_node_hours: float
    """Node time that the job held in a month of 30 days, spares included."""

    @property
    def stage_to_shorten(self) -> str:
        """Stage with the greatest loss, "" without one; overhead is no stage."""
        return next((name for name, share in self.by_stage.items() if share > 0 and name != "Overhead"), "")


def simulate(case: Case, seed: int) -> SimulationResult:
    """Simulate one seed of a case."""
    places = case.nodes + case.spares + case.shared
    faults = case.trace
    if faults is None:
        faults = draw(
            seed,
            slots=places,
            days=case.days,
            rate=case.rate,
            mix=case.mix,
            model=case.model,
            shared=case.shared,
        )
    lemons = frozenset(
        slot
        for slot in range(places)
        if random.Random(f"{seed}/{slot}/lemon").random() < case.model.lemon_share  # noqa: S311 - a simulation
    )
    setting = SimulationSettings(
        spec=case.spec, stages=case.stages, model=case.model, days=case.days, shared=case.shared
    )
    return Simulation(setting, lemons=lemons).run(faults)


def study(case: Case, seeds: int, *, done: Callable[[], None] = lambda: None) -> Result:
    """Simulate all seeds of a case; call `done()` after each."""
    outcomes = []
    for seed in range(seeds):
        outcomes.append(simulate(case, seed))
        done()
    wall = sum(outcome.wall for outcome in outcomes) or 1.0
    in_force = sum(sum(outcome.sizes.values()) for outcome in outcomes) or 1.0
    return Result(
        case=case,
        seeds=seeds,
        strict=Estimate.of([outcome.strict for outcome in outcomes]),
        uptime=Estimate.of([outcome.uptime for outcome in outcomes]),
        work=Estimate.of([outcome.work for outcome in outcomes]),
        fleet=Estimate.of([outcome.fleet(case.nodes) for outcome in outcomes]),
        worst_day=min(outcome.worst_day for outcome in outcomes),
        by_cause=_shares((outcome.lost_by_cause for outcome in outcomes), wall),
        by_stage=_shares((outcome.lost_by_stage for outcome in outcomes), wall),
        sizes=dict(sorted(_shares((outcome.sizes for outcome in outcomes), in_force).items(), reverse=True)),
        recoveries=_recoveries([each for outcome in outcomes for each in outcome.recoveries], seeds * case.days),
        rollbacks=Rollbacks(sum(outcome.rollbacks for outcome in outcomes), wall),
        node_hours=seeds * case.days * 24 * (case.nodes + case.spares),
        held_node_hours=mean(outcome.ledger.node_seconds for outcome in outcomes) / HOUR * MONTH / (case.days * DAY),
    )


def gain_of_spares(before: Result, after: Result) -> tuple[float, float]:
    """Return the node-hours a month of 30 days that the additional spares of `after` gain and hold."""
    hours = MONTH / HOUR
    gain = (after.work.mean - before.work.mean) * after.case.nodes * hours
    return gain, (after.case.spares - before.case.spares) * hours


def _shares(parts: Iterable[Mapping[Key, float]], whole: float) -> dict[Key, float]:
    summed: dict[Key, float] = defaultdict(float)
    for part in parts:
        for key, seconds in part.items():
            summed[key] += seconds
    return {key: seconds / whole for key, seconds in sorted(summed.items(), key=lambda item: -item[1])}


def _recoveries(all_of_them: Sequence[Interruption], days: float) -> tuple[Recoveries, ...]:
    by_cause: dict[Cause, list[Interruption]] = defaultdict(list)
    for each in all_of_them:
        by_cause[each.cause].append(each)
    found = []
    for cause, recoveries in by_cause.items():
        seconds = sorted(each.recovered_seconds for each in recoveries if each.recovered_seconds is not None)
        if seconds:
            found.append(
                Recoveries(
                    cause=cause,
                    per_day=len(recoveries) / days,
                    median=median(seconds),
                    slow=seconds[min(len(seconds) - 1, math.ceil(0.95 * len(seconds)) - 1)],
                    longest=seconds[-1],
                    steps_lost=max(each.steps_lost or 0 for each in recoveries),
                )
            )
    return tuple(sorted(found, key=lambda each: -each.per_day))


def _student(freedom: int) -> float:
    """Return the 97.5 % point of Student's t (Hill's expansion; exact values for few degrees of freedom)."""
    exact = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
    if freedom in exact:
        return exact[freedom]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
