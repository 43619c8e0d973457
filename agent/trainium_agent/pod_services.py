"""Hold what a pod provides to each generation that runs on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_agent.workload import rank_port

if TYPE_CHECKING:
    from trainium_agent.coordinator.report import PodReport
    from trainium_agent.hang.detection import Calibration
    from trainium_agent.ranks.standby_manager import StandbyManager
    from trainium_agent.settings import AgentSettings
    from trainium_agent.threads import BlockingWorker, EventLoop
    from trainium_agent.workload.rank_port import RankPort
    from trainium_agent.workload.workload import Workload
    from trainium_contract.wire.messages import CheckResult


@dataclass(frozen=True, slots=True)
class PodServices:
    """The parts of the agent that outlive a generation."""

    settings: AgentSettings
    workload: Workload
    standby_manager: StandbyManager
    report: PodReport
    """Used in the event loop only."""
    calibration: Calibration
    event_loop: EventLoop
    worker: BlockingWorker

    def reserve_port(self, address: str) -> RankPort:
        """Reserve a port for ranks. Raises OSError, and StandbyLostError."""
        return rank_port.reserve_port(address, self.standby_manager if self.workload.ranks.uses_agent_store else None)

    def record_check(self, result: CheckResult) -> None:
        """Report the newest outcome of a check of this node, from any thread."""
        self.event_loop.post(lambda: self.report.record_check(result))
