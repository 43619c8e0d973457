"""Events: what changed between the old status and the new one, told once, after the new one is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.job import ConditionType, Rung
from trainium_operator.plan.conditions import find_condition, is_true
from trainium_operator.plan.reasons import Reason

if TYPE_CHECKING:
    from trainium_contract.job import Interruption, TrainingJobStatus
    from trainium_operator.plan.facts import Draft


def announce(old: TrainingJobStatus, draft: Draft) -> None:
    """Add the events that follow from the difference."""
    known = {_identity(entry): entry for entry in old.history}
    for entry in draft.status.history:
        before = known.get(_identity(entry))
        if before is None:
            _began(draft, entry)
        if entry.recovered_seconds is not None and (before is None or before.recovered_seconds is None):
            _ended(old, draft, entry)
    _transitions(old, draft)


def _identity(entry: Interruption) -> tuple[int, int, str, str, bool]:
    return (entry.generation, entry.attempt, entry.time, entry.pod, entry.rung is Rung.IN_PLACE)


def _began(draft: Draft, entry: Interruption) -> None:
    if entry.rung is Rung.STOP:
        return
    planned = entry.rung in (Rung.RESIZE, Rung.GROW)
    draft.note(
        Reason.SIZE_REQUESTED if entry.rung is Rung.RESIZE else Reason.RESIZED if planned else Reason.INTERRUPTED,
        f"{entry.cause.value}: {entry.message}",
        warning=not planned,
        pod=entry.pod,
        node="" if entry.pod else entry.node,
    )


def _ended(old: TrainingJobStatus, draft: Draft, entry: Interruption) -> None:
    lost = "" if entry.steps_lost is None else f", {entry.steps_lost} steps lost"
    draft.note(
        Reason.RESIZED if entry.rung in (Rung.RESIZE, Rung.GROW) else Reason.RECOVERED,
        f"Training goes on after {entry.recovered_seconds} s ({entry.cause.value}, {entry.rung.value}{lost}, "
        f"{entry.pods_replaced} pods replaced).",
    )
    durable = old.checkpoint.durable_step
    if entry.resume_step is not None and entry.resume_step < durable:
        draft.note(
            Reason.CHECKPOINT_SKIPPED,
            f"Training resumed from step {entry.resume_step} although step {durable} was committed: the newest "
            "checkpoint did not verify. Look at the storage and at the workers' logs.",
            warning=True,
        )


def _transitions(old: TrainingJobStatus, draft: Draft) -> None:
    new = draft.status
    for kind, reason, warning in (
        (ConditionType.ADMITTED, Reason.ADMITTED, False),
        (ConditionType.COMPLETE, Reason.COMPLETED, False),
        (ConditionType.FAILED, None, True),
        (ConditionType.SUSPENDED, Reason.SUSPENDED, False),
    ):
        condition = find_condition(new, kind)
        if condition is not None and is_true(new, kind) and not is_true(old, kind):
            draft.note(reason or Reason(condition.reason), condition.message, warning=warning)
    if is_true(old, ConditionType.SUSPENDED) and not is_true(new, ConditionType.SUSPENDED):
        draft.note(Reason.RESUMED, "The job is active again; it resumes from its newest checkpoint.")
    legal, before = find_condition(new, ConditionType.SIZE_LEGAL), find_condition(old, ConditionType.SIZE_LEGAL)
    if legal is not None and not is_true(new, ConditionType.SIZE_LEGAL) and legal != before:
        draft.note(Reason(legal.reason), legal.message, warning=True)
    if new.checkpoint.durable_step >= 0 > old.checkpoint.durable_step:
        draft.note(Reason.CHECKPOINT_COMMITTED, f"The first durable checkpoint is step {new.checkpoint.durable_step}.")
    if new.checkpoint.notice and new.checkpoint.notice != old.checkpoint.notice:
        draft.note(Reason.CHECKPOINT_NOTICE, new.checkpoint.notice, warning=True)
    for alert in new.alerts:
        if alert not in old.alerts:
            draft.note(Reason(alert.kind), alert.message, warning=True)
    unhealthy = find_condition(new, ConditionType.CHECKPOINT_HEALTHY)
    if unhealthy is not None and unhealthy.reason in (Reason.STORAGE_UNAVAILABLE, Reason.CHECKPOINT_OVERDUE):
        seen = find_condition(old, ConditionType.CHECKPOINT_HEALTHY)
        if seen is None or seen.reason != unhealthy.reason:
            draft.note(Reason(unhealthy.reason), unhealthy.message, warning=True)
