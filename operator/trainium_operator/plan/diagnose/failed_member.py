"""Define the failure or departure of one member, as `diagnosis` returns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.faults.classify import suspects_node

if TYPE_CHECKING:
    from trainium_contract.faults.causes import Cause
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.view.workers import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMember:
    """One member that cannot continue."""

    member: Member
    worker: Worker | None
    """None when its pod is gone."""
    cause: Cause
    failed_at: float
    """Unix seconds, as precisely as it is known; for a silent worker when it was last seen, see
    `silence.find_failure_time`."""
    message: str
    force_delete: bool = False
    """Its node cannot confirm a deletion."""
    can_save: bool = False
    """It is leaving on request and still answers: all ranks may save before they leave."""
    keeps_pod: bool = False
    """Its pod is deleted only after another worker has its rank."""

    awaits_replacement: bool = True
    """Whether the others must wait for a replacement; if False, they continue without it, and no replacement on such a
    node is awaited."""
    blames_node: bool | None = None
    """Whether a rule of the job suspects its node; None: as the cause decides."""

    @property
    def suspected_node(self) -> str:
        """The node to avoid; empty when none is suspected."""
        blamed = suspects_node(self.cause) if self.blames_node is None else self.blames_node
        return self.member.node_name if blamed else ""
