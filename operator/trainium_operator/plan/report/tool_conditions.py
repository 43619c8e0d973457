"""The conditions for tools that do not know TrainingJobs (kstatus, Argo CD, kubectl wait): Ready, Stalled, Finished.

Invariants: they follow from phase and conditions alone, so they never say another thing; Finished is True at both ends;
Stalled is True only where nothing will change until a person acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.conditions import ConditionStatus, ConditionType, Phase
from trainium_operator.plan.model.conditions import find_condition, is_true, with_condition
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from trainium_operator.plan.model.conditions import AnyShown

_NOT_READY: dict[Phase, Reason] = {
    Phase.PENDING: Reason.NOT_STARTED,
    Phase.STARTING: Reason.STARTING,
    Phase.RECOVERING: Reason.INTERRUPTED,
    Phase.RESIZING: Reason.SIZE_REQUESTED,
    Phase.SUSPENDING: Reason.SUSPENDING,
    Phase.SUSPENDED: Reason.SUSPENDED,
    Phase.STOPPING: Reason.STOPPING,
    Phase.TERMINATING: Reason.TERMINATING,
}
_NEEDS_A_PERSON = frozenset(
    {Reason.NO_LEGAL_SIZE, Reason.INVALID_SPEC, Reason.GANG_API_MISSING, Reason.DEVICE_API_MISSING, Reason.NAME_TAKEN}
)


def tell_tools(status: AnyShown, now: float) -> AnyShown:
    """The status with the three conditions; call when all others are set."""
    failed = find_condition(status, ConditionType.FAILED)
    if failed is not None and failed.status is ConditionStatus.TRUE:
        reason = Reason(failed.reason)
        status = with_condition(status, ConditionType.READY, False, reason, failed.message, now=now)
        status = with_condition(status, ConditionType.STALLED, True, reason, failed.message, now=now)
        return with_condition(status, ConditionType.FINISHED, True, reason, "the job has failed", now=now)
    if is_true(status, ConditionType.COMPLETE):
        done = "the job has completed"
        status = with_condition(status, ConditionType.READY, True, Reason.COMPLETED, done, now=now)
        status = with_condition(status, ConditionType.STALLED, False, Reason.COMPLETED, "", now=now)
        return with_condition(status, ConditionType.FINISHED, True, Reason.COMPLETED, done, now=now)
    reason = _NOT_READY.get(status.phase, Reason.TRAINING)
    ready = reason is Reason.TRAINING
    status = with_condition(status, ConditionType.READY, ready, reason, "" if ready else "see the phase", now=now)
    blocked = next((each for each in status.conditions if _blocks(each.status, each.reason)), None)
    why, message = (Reason(blocked.reason), blocked.message) if blocked else (Reason.PROGRESSING, "")
    status = with_condition(status, ConditionType.STALLED, blocked is not None, why, message, now=now)
    return with_condition(status, ConditionType.FINISHED, False, Reason.PROGRESSING, "", now=now)


def _blocks(state: ConditionStatus, reason: str) -> bool:
    return state is ConditionStatus.FALSE and reason in _NEEDS_A_PERSON
