"""Map each cause of a fault to its default responses, which a sign may replace (`signs`).

Invariants: every cause has its responses. Text never ends a job at its first appearance, because it can mislead and a
restart in place is cheap (`get_responses_for_text`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.rules import RuleAction


class Response(StrEnum):
    """Response to a single exit of a training process."""

    COMPLETE = "Complete"
    STOP = "Stop"
    RESTART_IN_PLACE = "RestartInPlace"
    RESTART_UNCOUNTED = "RestartUncounted"
    REPLACE_WORKER = "ReplaceWorker"
    """Another pod, on any node."""
    REPLACE_NODE = "ReplaceNode"
    """Another pod; new pods avoid this node."""
    RETRY_WITH_BACKOFF = "RetryWithBackoff"


@dataclass(frozen=True, slots=True)
class Responses:
    """The first response to a fault, and the one after that did not help."""

    first: Response
    repeated: Response
    """The same cause again, without a new step in between."""


COMPLETE = Responses(Response.COMPLETE, Response.COMPLETE)
STOP = Responses(Response.STOP, Response.STOP)
RESTART = Responses(Response.RESTART_IN_PLACE, Response.RESTART_IN_PLACE)
RESTART_THEN_STOP = Responses(Response.RESTART_IN_PLACE, Response.STOP)
RESTART_THEN_LEAVE_NODE = Responses(Response.RESTART_IN_PLACE, Response.REPLACE_NODE)
RESTART_WITH_PAUSES = Responses(Response.RETRY_WITH_BACKOFF, Response.RETRY_WITH_BACKOFF)
START_AGAIN = Responses(Response.RESTART_UNCOUNTED, Response.RESTART_UNCOUNTED)
NEW_WORKER = Responses(Response.REPLACE_WORKER, Response.REPLACE_WORKER)
LEAVE_NODE = Responses(Response.REPLACE_NODE, Response.REPLACE_NODE)

RESPONSES: dict[Cause, Responses] = {
    Cause.USER_ERROR: STOP,
    Cause.NUMERICAL: STOP,
    Cause.DEVICE: LEAVE_NODE,
    Cause.DEVICE_REPAIRABLE: RESTART_THEN_LEAVE_NODE,
    Cause.OUT_OF_MEMORY: RESTART_THEN_STOP,
    Cause.LOCAL_STORAGE: NEW_WORKER,
    Cause.HOST: LEAVE_NODE,
    Cause.NETWORK: RESTART_THEN_LEAVE_NODE,
    Cause.ACCELERATOR_RUNTIME: RESTART_THEN_LEAVE_NODE,
    Cause.HANG: RESTART_THEN_LEAVE_NODE,
    Cause.CRASH: RESTART_THEN_LEAVE_NODE,
    Cause.NODE_LOST: LEAVE_NODE,
    Cause.STRAGGLER: LEAVE_NODE,
    Cause.POD_LOST: NEW_WORKER,
    Cause.STORAGE: RESTART_WITH_PAUSES,
    Cause.DEVICE_TAINTED: NEW_WORKER,
    Cause.PREEMPTED: NEW_WORKER,
    Cause.CAPACITY: NEW_WORKER,
    Cause.RESIZE: START_AGAIN,
    Cause.YIELDED: START_AGAIN,
    Cause.FINISHED: COMPLETE,
    Cause.PEER_LOST: RESTART,
}
"""By cause; a sign that is more specific than its cause has separate responses (`signs`)."""

RULE_RESPONSES: dict[RuleAction, Responses] = {
    RuleAction.STOP: STOP,
    RuleAction.RESTART_IN_PLACE: RESTART,
    RuleAction.REPLACE_WORKER: NEW_WORKER,
    RuleAction.AVOID_NODE: LEAVE_NODE,
}
"""Response of a rule of the job."""


def get_responses_for_text(cause: Cause) -> Responses:
    """Return the responses of a sign that is only text: the job never stops at its first appearance."""
    responses = RESPONSES[cause]
    return RESTART_THEN_STOP if responses.first is Response.STOP else responses


def get_responses_for_pod(*, suspects_node: bool) -> Responses:
    """Return the responses of a pod that ended: nothing in it can restart."""
    return LEAVE_NODE if suspects_node else NEW_WORKER
