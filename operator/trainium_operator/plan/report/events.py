"""List the events between the old status and the new one; each is recorded once, after the new one is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import pluralize
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import PLANNED_RESPONSES, Interruption, RecoveryResponse
from trainium_operator.plan.history.interruptions import get_identity
from trainium_operator.plan.model.actions import Event, build_event
from trainium_operator.plan.model.conditions import find_condition, is_true
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.report.run_results import describe_artifact, describe_evaluation, get_artifact_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.status.public import PublicStatus


def list_events(old: PublicStatus, new: PublicStatus) -> tuple[Event, ...]:
    """Return the events that follow from the difference."""
    events: list[Event] = []
    old_entries = {get_identity(entry): entry for entry in old.history}
    for entry in new.history:
        before = old_entries.get(get_identity(entry))
        if before is None:
            events += _list_begin_events(entry)
        is_over = entry.recovered_seconds is not None and entry.response is not RecoveryResponse.SUSPEND
        if is_over and (before is None or before.recovered_seconds is None):
            events += _list_end_events(old, new, entry)
    return (*events, *_list_transitions(old, new))


def _list_begin_events(entry: Interruption) -> Iterator[Event]:
    if entry.response is RecoveryResponse.STOP:
        return
    planned = entry.response in (RecoveryResponse.RESIZE, RecoveryResponse.GROW)
    yield build_event(
        Reason.SIZE_REQUESTED
        if entry.response is RecoveryResponse.RESIZE
        else Reason.RESIZED
        if planned
        else Reason.INTERRUPTED,
        f"{entry.cause.value}: {entry.message}",
        warning=not planned,
        pod=entry.pod,
        node="" if entry.pod else entry.node,
    )


def _list_end_events(old: PublicStatus, new: PublicStatus, entry: Interruption) -> Iterator[Event]:
    steps_lost = "" if entry.steps_lost is None else f", {pluralize(entry.steps_lost, 'step')} lost"
    response = ", ".join(dict.fromkeys((entry.cause.value, entry.response.value)))  # both are named Resize
    # Without a step nobody knows when a program trains.
    subject = "Training goes on" if new.progress.step > 0 else "The processes run again"
    yield build_event(
        Reason.RESIZED if entry.response in PLANNED_RESPONSES else Reason.RECOVERED,
        f"{subject} after {entry.recovered_seconds} s ({response}{steps_lost}, "
        f"{pluralize(entry.pods_replaced, 'pod')} replaced).",
    )
    durable_step = old.checkpoint.durable_step
    if entry.resume_step is not None and entry.resume_step < durable_step:
        yield build_event(
            Reason.CHECKPOINT_SKIPPED,
            f"Training resumed from step {entry.resume_step} although step {durable_step} was committed: the newest "
            "checkpoint did not verify. Look at the storage and at the workers' logs.",
            warning=True,
        )


def _list_transitions(old: PublicStatus, new: PublicStatus) -> Iterator[Event]:
    for kind, reason, warning in (
        (ConditionType.ADMITTED, Reason.ADMITTED, False),
        (ConditionType.COMPLETE, Reason.COMPLETED, False),
        (ConditionType.FAILURE_TARGET, None, True),
        (ConditionType.FAILED, None, True),
        (ConditionType.SUSPENDED, Reason.SUSPENDED, False),
    ):
        condition = find_condition(new, kind)
        if condition is not None and is_true(new, kind) and not is_true(old, kind):
            yield build_event(reason or Reason(condition.reason), condition.message, warning=warning)
    if is_true(old, ConditionType.SUSPENDED) and not is_true(new, ConditionType.SUSPENDED):
        yield build_event(
            Reason.RESUMED, "The job is active again; it resumes from its newest checkpoint, if it has one."
        )
    yield from _list_new_reasons(old, new, ConditionType.ADMITTED, Reason.WAITING_FOR_QUEUE, Reason.EVICTED)
    yield from _list_new_reasons(old, new, ConditionType.NODES_HEALTHY, Reason.CONTACT_LOST, warning=True)
    reported, before = (find_condition(status, ConditionType.PROGRESS_REPORTED) for status in (new, old))
    unreadable = reported is not None and reported.reason == Reason.PROGRESS_UNREADABLE
    if reported is not None and unreadable and (before is None or before.message != reported.message):
        yield build_event(Reason.PROGRESS_UNREADABLE, reported.message, warning=True)
    legal, before = (find_condition(status, ConditionType.SIZE_LEGAL) for status in (new, old))
    if legal is not None and not is_true(new, ConditionType.SIZE_LEGAL) and legal != before:
        yield build_event(Reason(legal.reason), legal.message, warning=True)
    if legal is not None and legal.reason == Reason.NODES_IN_RESERVE and (before is None or before != legal):
        yield build_event(Reason.NODES_IN_RESERVE, legal.message)
    if new.checkpoint.durable_step >= 0 > old.checkpoint.durable_step:
        yield build_event(
            Reason.CHECKPOINT_COMMITTED, f"The first durable checkpoint is step {new.checkpoint.durable_step}."
        )
    if new.checkpoint.notice and new.checkpoint.notice != old.checkpoint.notice:
        yield build_event(Reason.CHECKPOINT_NOTICE, new.checkpoint.notice, warning=True)
    for alert in new.alerts:
        if alert not in old.alerts:
            yield build_event(Reason(alert.kind), alert.message, warning=True)
    reported_keys = {get_artifact_key(artifact) for artifact in old.artifacts}
    for artifact in new.artifacts:
        if get_artifact_key(artifact) not in reported_keys:
            yield build_event(Reason.ARTIFACT_WRITTEN, describe_artifact(artifact))
    if new.evaluation and new.evaluation != old.evaluation:
        yield build_event(Reason.EVALUATED, describe_evaluation(new.evaluation))
    kind = ConditionType.CHECKPOINT_HEALTHY
    yield from _list_new_reasons(old, new, kind, Reason.STORAGE_UNAVAILABLE, Reason.CHECKPOINT_OVERDUE, warning=True)


def _list_new_reasons(
    old: PublicStatus, new: PublicStatus, kind: ConditionType, *reasons: Reason, warning: bool = False
) -> Iterator[Event]:
    """Yield an event if the condition has one of these reasons, and had another one before."""
    after, before = find_condition(new, kind), find_condition(old, kind)
    if after is not None and after.reason in reasons and (before is None or before.reason != after.reason):
        yield build_event(Reason(after.reason), after.message, warning=warning)
