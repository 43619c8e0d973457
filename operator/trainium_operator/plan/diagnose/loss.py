"""One member that cannot go on, as `losses`, `process_failures` and `stragglers` return it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.faults.classify import suspects_node

if TYPE_CHECKING:
    from trainium_contract.faults.causes import Cause
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.view.workers import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One member that cannot go on."""

    member: Member
    worker: Worker | None
    """None when its pod is gone."""
    cause: Cause
    failed_at: float
    """Unix seconds, as well as it is known; for a silent worker when it was last seen, see `losses.failed_since`."""
    message: str
    force: bool = False
    """Its node cannot confirm a deletion."""
    saves: bool = False
    """It is leaving on request and still answers: all ranks may save before they leave."""
    stays: bool = False
    """Its pod is deleted only after its rank has gone to another worker."""

    missed: bool = True
    """False: the others go on without it at once, and nobody on such a node is waited for."""
    blames_node: bool | None = None
    """Whether its node is suspected, where a rule of the job decides it; None: as its cause does."""

    @property
    def suspect(self) -> str:
        """The node to keep away from; empty when none is suspected."""
        blamed = suspects_node(self.cause) if self.blames_node is None else self.blames_node
        return self.member.node_name if blamed else ""
