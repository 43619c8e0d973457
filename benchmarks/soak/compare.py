"""The simulator on the schedule of a soak, with the stages that the soak's first half showed, beside what was measured.

Invariants: what is judged lies after what was learned from; both sides count by the same ledger, over the same seconds.
A median is judged where both sides have one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.soak.course import MODEL, spec
from trainium_simulator.virtual.failures import FaultClass
from trainium_simulator.virtual.schedule import DAY
from trainium_simulator.virtual.world import Setting, World

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.soak.course import Course
    from trainium_simulator.stages import StageTimes
    from trainium_simulator.virtual.outcome import SimulationResult
    from trainium_simulator.virtual.schedule import Fault

GOODPUT_ALLOWED = 0.10
MEDIAN_ALLOWED = 0.20
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Productive and wall seconds between two looks at a ledger."""

    productive: float
    wall: float

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> Window:
        """Of two ledgers as the API server writes them."""
        productive = after["productiveSeconds"] - before["productiveSeconds"]
        return cls(productive=productive, wall=after["wallSeconds"] - before["wallSeconds"])

    @property
    def strict(self) -> float:
        """Strict goodput of the window."""
        return self.productive / self.wall if self.wall > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """One interruption that was over."""

    cause: str
    rung: str
    at: float
    seconds: float
    stages: Mapping[str, float]

    @property
    def kind(self) -> str:
        """Cause and answer."""
        return f"{self.cause}, {self.rung}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Recoveries of one kind on both sides; seconds, None where there was none."""

    kind: str
    measured: float | None
    simulated: float | None
    times: tuple[int, int]

    @property
    def off(self) -> float | None:
        """Share of the measured one."""
        if self.measured is None or self.simulated is None or not self.measured:
            return None
        return self.simulated / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """What a machine takes to bring back what a fault took."""

    operator_seconds: float
    """From the end of an operator until another leads."""
    node_seconds: float
    """From the start of a machine until its node is Ready."""

    def of(self, fault: Fault) -> Fault:
        """The fault as long as it lasted in fact."""
        if fault.kind is FaultClass.OPERATOR_LOST:
            return replace(fault, lasts=self.operator_seconds)
        return replace(fault, lasts=fault.lasts + self.node_seconds) if fault.kind in _OF_NODES else fault


_OF_NODES = frozenset({FaultClass.DEVICE_ERROR, FaultClass.NODE_LOST, FaultClass.RACK, FaultClass.MAINTENANCE})


def simulated(course: Course, stages: StageTimes, slowness: Slowness, until: float) -> SimulationResult:
    """The same schedule in virtual time, as far as `until` seconds after the job's creation."""
    setting = Setting(spec=spec(), stages=stages, model=MODEL, days=until / DAY)
    return World(setting).live(slowness.of(fault) for fault in course.faults)


def ledger_of(outcome: SimulationResult) -> Json:
    """A simulated ledger, as the API server would write it."""
    return outcome.ledger.model_dump(by_alias=True, mode="json")


def recovered_of(outcome: SimulationResult) -> list[Recovered]:
    """Of the simulator."""
    return [
        Recovered(cause=each.cause, rung=each.rung, at=each.at, seconds=each.seconds, stages=each.stages)
        for each in outcome.recoveries
        if each.seconds is not None
    ]


def recovered_from(history: Iterable[Json], zero: float) -> list[Recovered]:
    """Of the soak; `zero`: Unix seconds of the job's creation."""
    return [
        Recovered(
            cause=entry["cause"],
            rung=entry["rung"],
            at=(entry.get("failedAt") or zero) - zero,
            seconds=entry["recoveredSeconds"],
            stages={name.capitalize(): seconds for name, seconds in (entry.get("stages") or {}).items()},
        )
        for entry in history
        if entry.get("recoveredSeconds") is not None
    ]


def rows(measured: Sequence[Recovered], simulated: Sequence[Recovered]) -> list[Row]:
    """Medians by cause and answer, what was measured most often first."""
    here, there = _grouped(measured), _grouped(simulated)
    kinds = sorted({*here, *there}, key=lambda kind: (-len(here.get(kind, [])), kind))
    return [
        Row(
            kind=kind,
            measured=median(here[kind]) if kind in here else None,
            simulated=median(there[kind]) if kind in there else None,
            times=(len(here.get(kind, [])), len(there.get(kind, []))),
        )
        for kind in kinds
    ]


def _grouped(recovered: Iterable[Recovered]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for each in recovered:
        found[each.kind].append(each.seconds)
    return found
