"""Define the rows that a job adds to the table of faults: `spec.recovery.rules`. They precede the built-in ones."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel
from trainium_contract.faults.causes import Cause


class RuleAction(StrEnum):
    """Action of a rule."""

    STOP = "Stop"
    """Stop the job with a verdict."""
    RESTART_IN_PLACE = "RestartInPlace"
    """Restart the processes, keep the pods."""
    REPLACE_WORKER = "ReplaceWorker"
    """Replace the pod, and blame no node."""
    AVOID_NODE = "AvoidNode"
    """Replace the pod on another node, and avoid this one."""


class RecoveryRule(ContractModel):
    """A row that comes before the built-in table; all conditions that are given must hold, at least one must be."""

    exit_codes: Annotated[tuple[Annotated[int, Field(ge=1, le=255)], ...], Field(max_length=16)] = ()
    """Exit codes of a training process (128 + signal for a killed one)."""
    reason: Annotated[str, Field(max_length=128)] = ""
    """Reason of the pod or a node condition, key of a taint, or name of the runtime's status (NRT_TIMEOUT)."""
    message: Annotated[str, Field(max_length=256)] = ""
    """Text that the last output, a message of the pod or condition, or a kernel line contains (case counts)."""
    cause: Cause
    """Cause that it is attributed to; sets the budget."""
    action: RuleAction
    """Response to it."""
