"""`status.history` and `status.restarts`: interruptions of training, their causes and the responses."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import StatusModel, Text
from trainium_contract.faults.causes import Cause
from trainium_contract.status.ledger import StageSeconds

MAX_COUNTED_CAUSES = 32
"""More than there are causes, so that those of a newer operator fit."""


class RecoveryResponse(StrEnum):
    """Response to an interruption, by how far it went."""

    IN_PLACE = "InPlace"
    """Processes restarted, pods kept."""
    SPARE = "Spare"
    """A warm spare got the lost worker's rank."""
    REPLACE = "Replace"
    """A new pod got it."""
    SHRINK = "Shrink"
    GROW = "Grow"
    RESIZE = "Resize"
    """The user changed the size."""
    SUSPEND = "Suspend"
    """All workers were released, and what their ranks made after their newest checkpoint is lost."""
    STOP = "Stop"
    """Ended with a verdict."""


PLANNED_RESPONSES = frozenset({RecoveryResponse.GROW, RecoveryResponse.RESIZE, RecoveryResponse.SUSPEND})
"""Responses to no fault."""


class Interruption(StatusModel):
    """One interruption of training and the response; times in seconds by the operator's or the agent's clock."""

    generation: int
    """Generation that was interrupted."""
    attempt: int = 0
    """Attempt within it that the interruption ended."""
    time: Annotated[str, Field(max_length=32)]
    """When it was detected, RFC 3339."""
    cause: Cause
    """Why training stopped."""
    response: RecoveryResponse
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
    """Unix seconds of the failure, as precisely as it is known."""
    decided_at: float | None = None
    """Unix seconds of the decision on the next generation; absent for a restart in place."""
    stages: StageSeconds | None = None
    """Seconds that the ledger attributes to it so far; less than recoveredSeconds where interruptions overlap."""
    rank: int | None = None
    """First rank of the worker that failed, in that generation; absent when none is known, or it had none."""

    @property
    def is_open(self) -> bool:
        """Return whether the recovery is in progress."""
        return self.recovered_seconds is None and self.response is not RecoveryResponse.STOP


class RestartsStatus(StatusModel):
    """Interruptions by faults since the job started, without changes of the size; never reset."""

    total: int = 0
    """All interruptions: the sum of byCause."""
    by_cause: Annotated[dict[str, int], Field(max_length=MAX_COUNTED_CAUSES)] = {}
    """Interruptions by cause."""
