"""The result of one simulation and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_contract.status.ledger import DOWN_STAGES
from trainium_simulator.virtual.schedule import DAY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.job import GoodputStatus
    from trainium_contract.status.interruptions import Interruption
    from trainium_simulator.virtual.failures import FaultClass

USER_WAIT = "UserWait"
"""Stage and cause of the time in which an ended job waits until a user recreates it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Result of one seed."""

    days: float
    ledger: GoodputStatus
    """Ledger of the job, summed over its recreations."""
    user_wait_seconds: float
    work_seconds: float
    """Seconds that an undisturbed run of the full size would have taken for the kept steps."""
    work_seconds_by_day: tuple[float, ...]
    """The same for each whole day."""
    seconds_by_size: Mapping[int, float]
    """Seconds at each size."""
    interruptions: tuple[Interruption, ...]
    """All interruptions, unfinished ones included."""
    fault_counts: Mapping[FaultClass, int] = field(default_factory=dict)
    recreations: int = 0
    rollbacks: int = 0
    """Number of resumptions from the durable tier that repeat steps."""

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first generation to the end, including waits for a user."""
        return self.ledger.wall_seconds + self.user_wait_seconds

    @property
    def strict_goodput(self) -> float:
        """Strict goodput (docs/goodput.md) from 0 to 1, where waits for a user count as lost."""
        return _divide(self.ledger.productive_seconds, self.wall_seconds)

    @property
    def uptime(self) -> float:
        """Share of the time in which ranks trained, from 0 to 1."""
        down_seconds = sum(self.ledger.lost_by_stage.get(stage, 0.0) for stage in DOWN_STAGES)
        return max(0.0, 1.0 - _divide(down_seconds + self.user_wait_seconds, self.wall_seconds))

    @property
    def work_done(self) -> float:
        """Kept steps as a share of those of an undisturbed run of the full size; above 1 with idle nodes."""
        return max(0.0, self.work_seconds / (self.days * DAY)) if self.days > 0 else 0.0

    def compute_fleet_utilization(self, nodes: int) -> float:
        """Return the work done, in time of `nodes` nodes, as a share of all node time that the job held."""
        return _divide(self.work_seconds * nodes, self.ledger.node_seconds)

    @property
    def lost_by_cause(self) -> dict[str, float]:
        """Lost seconds by cause, including waits for a user."""
        return self.ledger.lost_seconds | ({USER_WAIT: self.user_wait_seconds} if self.user_wait_seconds else {})

    @property
    def lost_by_stage(self) -> dict[str, float]:
        """Lost seconds by stage, including waits for a user."""
        return self.ledger.lost_by_stage | ({USER_WAIT: self.user_wait_seconds} if self.user_wait_seconds else {})

    @property
    def worst_day(self) -> float:
        """Steps of the worst day as a share of an undisturbed day's; 1 for less than a day."""
        return min((work_seconds / DAY for work_seconds in self.work_seconds_by_day), default=1.0)


def _divide(part: float, total: float) -> float:
    return min(1.0, max(0.0, part / total)) if total > 0 else 0.0
