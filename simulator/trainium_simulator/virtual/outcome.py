"""Hold the outcome of one simulated month, and derive its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_simulator.virtual.schedule import DAY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.job import GoodputStatus
    from trainium_contract.status.interruptions import Interruption
    from trainium_simulator.virtual.failures import FaultClass

_DOWN = ("Detect", "Decide", "Restart", "Load", "Startup")
PERSON = "Person"
"""Time in which a job that had ended waited for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One seed's run."""

    days: float
    ledger: GoodputStatus
    """The job's own, of all its incarnations together."""
    person_seconds: float
    work_seconds: float
    """Time that an undisturbed run of the full size would have needed for the steps that were kept."""
    by_day: tuple[float, ...]
    """The same, by day."""
    sizes: Mapping[int, float]
    """Seconds in force at each size."""
    recoveries: tuple[Interruption, ...]
    """Every interruption of the history, those that were not over at the end among them."""
    faults: Mapping[FaultClass, int] = field(default_factory=dict)
    verdicts: int = 0
    rollbacks: int = 0
    """Times that training went on from the durable tier."""

    @property
    def wall(self) -> float:
        """From the first generation to the end, waits for a person included."""
        return self.ledger.wall_seconds + self.person_seconds

    @property
    def strict(self) -> float:
        """Strict goodput (docs/goodput.md), with the waits for a person."""
        return _ratio(self.ledger.productive_seconds, self.wall)

    @property
    def uptime(self) -> float:
        """1 - time in which nothing trained."""
        down = sum(self.ledger.lost_by_stage.get(stage, 0.0) for stage in _DOWN)
        return max(0.0, 1.0 - _ratio(down + self.person_seconds, self.wall))

    @property
    def work(self) -> float:
        """Steps that were kept, of those that an undisturbed run of the full size makes in the same time.

        On idle nodes, beyond that size, it can be more than 1.
        """
        return max(0.0, self.work_seconds / (self.days * DAY)) if self.days > 0 else 0.0

    def fleet(self, nodes: int) -> float:
        """Return what was paid for: work of so many nodes over all node time that the job held."""
        return _ratio(self.work_seconds * nodes, self.ledger.node_seconds)

    @property
    def lost_by_cause(self) -> dict[str, float]:
        """Seconds, the wait for a person among them."""
        return self.ledger.lost_seconds | ({PERSON: self.person_seconds} if self.person_seconds else {})

    @property
    def lost_by_stage(self) -> dict[str, float]:
        """The same by stage."""
        return self.ledger.lost_by_stage | ({PERSON: self.person_seconds} if self.person_seconds else {})

    @property
    def worst_day(self) -> float:
        """Share of an undisturbed day's steps on the worst one; 1 when the simulation is shorter than a day."""
        return min((made / DAY for made in self.by_day), default=1.0)


def _ratio(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
