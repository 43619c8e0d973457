"""`status.history` and `status.restarts`: when training was interrupted, why, and how that was answered."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import StatusModel, Text
from trainium_contract.faults.causes import Cause
from trainium_contract.status.ledger import StageSeconds

MAX_COUNTED_CAUSES = 32
"""More than there are causes: a newer operator's are kept."""


class Rung(StrEnum):
    """Which step of the recovery ladder answered an interruption."""

    IN_PLACE = "InPlace"
    """Processes restarted, pods kept."""
    SPARE = "Spare"
    """A warm spare took the lost worker's rank."""
    REPLACE = "Replace"
    """A new pod took it."""
    SHRINK = "Shrink"
    GROW = "Grow"
    RESIZE = "Resize"
    """The user changed the size."""
    STOP = "Stop"
    """Ended with a verdict."""


class Interruption(StatusModel):
    """One interruption of training and its answer; times in seconds by the operator's or the agent's clock."""

    generation: int
    """Generation that was interrupted."""
    attempt: int = 0
    """Attempt within it that the interruption ended."""
    time: Annotated[str, Field(max_length=32)]
    """When it was detected, RFC 3339."""
    cause: Cause
    """Why training stopped."""
    rung: Rung
    """Response to it."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Node of the worker that failed; empty when none is known."""
    pod: Annotated[str, Field(max_length=253)] = ""
    """Worker that failed; empty when none is known."""
    message: Text = ""
    """Evidence of it."""
    detected_seconds: float | None = None
    """From the failure to its detection."""
    recovered_seconds: float | None = None
    """From the failure to the first new step; absent while the recovery is under way."""
    step_before: int = -1
    """Last step completed before it."""
    resume_step: int | None = None
    """Step that training resumed from."""
    steps_lost: int | None = None
    """Steps that were computed again."""
    pods_replaced: int = 0
    """Pods that were created for the recovery."""
    failed_at: float | None = None
    """Unix seconds of the failure, as well as it is known."""
    decided_at: float | None = None
    """Unix seconds at which the next generation was decided on; absent for a restart in place."""
    stages: StageSeconds | None = None
    """Seconds that the ledger attributes to it so far; less than recoveredSeconds where interruptions overlap."""
    rank: int | None = None
    """First rank of the worker that failed, in that generation; absent when none is known, or it had none."""

    @property
    def is_open(self) -> bool:
        """Return whether the recovery is under way."""
        return self.recovered_seconds is None and self.rung is not Rung.STOP


class RestartsStatus(StatusModel):
    """Interruptions by faults since the job began, changes of the size left out; never reset."""

    total: int = 0
    """All interruptions: the sum of byCause."""
    by_cause: Annotated[dict[str, int], Field(max_length=MAX_COUNTED_CAUSES)] = {}
    """Interruptions by cause."""
