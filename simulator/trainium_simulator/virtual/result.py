"""The result of one simulation and its figures."""

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
"""Time in which an ended job waited to be recreated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Result of one seed."""

    days: float
    ledger: GoodputStatus
    """Ledger of the job, summed over its recreations."""
    person_seconds: float
    work_seconds: float
    """Seconds that an undisturbed run of the full size would have taken for the kept steps."""
    by_day: tuple[float, ...]
    """The same, by day."""
    sizes: Mapping[int, float]
    """Seconds at each size."""
    recoveries: tuple[Interruption, ...]
    """All interruptions, unfinished ones included."""
    faults: Mapping[FaultClass, int] = field(default_factory=dict)
    verdicts: int = 0
    rollbacks: int = 0
    """Number of resumptions from the durable tier."""

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
        """Kept steps as a share of those of an undisturbed run of the full size; above 1 with idle nodes."""
        return max(0.0, self.work_seconds / (self.days * DAY)) if self.days > 0 else 0.0

    def fleet(self, nodes: int) -> float:
        """Return the work of so many nodes as a share of all node time that the job held."""
        return _ratio(self.work_seconds * nodes, self.ledger.node_seconds)

    @property
    def lost_by_cause(self) -> dict[str, float]:
        """Lost seconds by cause, the wait to be recreated included."""
        return self.ledger.lost_seconds | ({PERSON: self.person_seconds} if self.person_seconds else {})

    @property
    def lost_by_stage(self) -> dict[str, float]:
        """Lost seconds by stage."""
        return self.ledger.lost_by_stage | ({PERSON: self.person_seconds} if self.person_seconds else {})

    @property
    def worst_day(self) -> float:
        """Steps of the worst day as a share of an undisturbed day's; 1 for less than a day."""
        return min((made / DAY for made in self.by_day), default=1.0)


def _ratio(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
