"""Set and read metav1 conditions; the transition time changes only with the status."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType
from trainium_operator.plan.model.text import format_sentence

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.reasons import Reason

StatusT = TypeVar("StatusT", bound="PublicStatus")
"""Any view of a status with conditions, so that callers get the type back that they passed."""


def find_condition(status: PublicStatus, kind: ConditionType) -> Condition | None:
    """Return the condition of that type; None when it was never set."""
    return next((condition for condition in status.conditions if condition.type is kind), None)


def is_true(status: PublicStatus, kind: ConditionType) -> bool:
    """Return whether the condition exists and is True."""
    condition = find_condition(status, kind)
    return condition is not None and condition.status is ConditionStatus.TRUE


def is_terminal(status: PublicStatus) -> bool:
    """Return whether the job has ended; both terminal conditions are final."""
    return is_true(status, ConditionType.COMPLETE) or is_true(status, ConditionType.FAILED)


def set_condition(
    status: StatusT, kind: ConditionType, value: bool | None, reason: Reason, message: str, *, now: float
) -> StatusT:
    """Set one condition; `value` None means Unknown. `observed_generation` is the status's own."""
    state = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}[value]
    old = find_condition(status, kind)
    since = old.last_transition_time if old is not None and old.status is state else format_rfc3339(now)
    new = Condition(
        type=kind,
        status=state,
        reason=reason.value,
        message=format_sentence(message),
        observed_generation=status.observed_generation,
        last_transition_time=since,
    )
    if old is None:
        return status.replaced(conditions=(*status.conditions, new))
    changed = tuple(new if condition.type is kind else condition for condition in status.conditions)
    return status.replaced(conditions=changed)
