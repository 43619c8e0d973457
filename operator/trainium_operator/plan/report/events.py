"""List the events between the old status and the new one; each is recorded once, after the new one is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import Interruption, Rung
from trainium_operator.plan.history.interruptions import identity
from trainium_operator.plan.model.actions import EventIntent, event
from trainium_operator.plan.model.conditions import find_condition, is_true
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import format_count
from trainium_operator.plan.report.run_results import artifact_key, artifact_sentence, evaluation_sentence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.status.public import PublicStatus


_QUEUED = frozenset({Reason.WAITING_FOR_QUEUE, Reason.EVICTED})


def list_events(old: PublicStatus, new: PublicStatus) -> tuple[EventIntent, ...]:
    """Return the events that follow from the difference."""
    events: list[EventIntent] = []
    known = {identity(entry): entry for entry in old.history}
    for entry in new.history:
        before = known.get(identity(entry))
        if before is None:
            events += _began(entry)
        if entry.recovered_seconds is not None and (before is None or before.recovered_seconds is None):
            events += _ended(old, entry)
    return (*events, *_transitions(old, new))


def _began(entry: Interruption) -> Iterator[EventIntent]:
    if entry.rung is Rung.STOP:
        return
    planned = entry.rung in (Rung.RESIZE, Rung.GROW)
    yield event(
        Reason.SIZE_REQUESTED if entry.rung is Rung.RESIZE else Reason.RESIZED if planned else Reason.INTERRUPTED,
        f"{entry.cause.value}: {entry.message}",
        warning=not planned,
        pod=entry.pod,
        node="" if entry.pod else entry.node,
    )


def _ended(old: PublicStatus, entry: Interruption) -> Iterator[EventIntent]:
    lost = "" if entry.steps_lost is None else f", {format_count(entry.steps_lost, 'step')} lost"
    yield event(
        Reason.RESIZED if entry.rung in (Rung.RESIZE, Rung.GROW) else Reason.RECOVERED,
        f"Training goes on after {entry.recovered_seconds} s ({entry.cause.value}, {entry.rung.value}{lost}, "
        f"{format_count(entry.pods_replaced, 'pod')} replaced).",
    )
    durable = old.checkpoint.durable_step
    if entry.resume_step is not None and entry.resume_step < durable:
        yield event(
            Reason.CHECKPOINT_SKIPPED,
            f"Training resumed from step {entry.resume_step} although step {durable} was committed: the newest "
            "checkpoint did not verify. Look at the storage and at the workers' logs.",
            warning=True,
        )


def _transitions(old: PublicStatus, new: PublicStatus) -> Iterator[EventIntent]:
    for kind, reason, warning in (
        (ConditionType.ADMITTED, Reason.ADMITTED, False),
        (ConditionType.COMPLETE, Reason.COMPLETED, False),
        (ConditionType.FAILURE_TARGET, None, True),
        (ConditionType.FAILED, None, True),
        (ConditionType.SUSPENDED, Reason.SUSPENDED, False),
    ):
        condition = find_condition(new, kind)
        if condition is not None and is_true(new, kind) and not is_true(old, kind):
            yield event(reason or Reason(condition.reason), condition.message, warning=warning)
    if is_true(old, ConditionType.SUSPENDED) and not is_true(new, ConditionType.SUSPENDED):
        yield event(Reason.RESUMED, "The job is active again; it resumes from its newest checkpoint.")
    queue, asked = find_condition(new, ConditionType.ADMITTED), find_condition(old, ConditionType.ADMITTED)
    if queue is not None and queue.reason in _QUEUED and (asked is None or asked.reason != queue.reason):
        yield event(Reason(queue.reason), queue.message)
    nodes, seen = find_condition(new, ConditionType.NODES_HEALTHY), find_condition(old, ConditionType.NODES_HEALTHY)
    if nodes is not None and nodes.reason == Reason.CONTACT_LOST and (seen is None or seen.reason != nodes.reason):
        yield event(Reason.CONTACT_LOST, nodes.message, warning=True)
    read, seen = (
        find_condition(new, ConditionType.PROGRESS_REPORTED),
        find_condition(old, ConditionType.PROGRESS_REPORTED),
    )
    if (
        read is not None
        and read.reason == Reason.PROGRESS_UNREADABLE
        and (seen is None or seen.message != read.message)
    ):
        yield event(Reason.PROGRESS_UNREADABLE, read.message, warning=True)
    legal, before = find_condition(new, ConditionType.SIZE_LEGAL), find_condition(old, ConditionType.SIZE_LEGAL)
    if legal is not None and not is_true(new, ConditionType.SIZE_LEGAL) and legal != before:
        yield event(Reason(legal.reason), legal.message, warning=True)
    if legal is not None and legal.reason == Reason.NODES_IN_RESERVE and (before is None or before != legal):
        yield event(Reason.NODES_IN_RESERVE, legal.message)
    if new.checkpoint.durable_step >= 0 > old.checkpoint.durable_step:
        yield event(Reason.CHECKPOINT_COMMITTED, f"The first durable checkpoint is step {new.checkpoint.durable_step}.")
    if new.checkpoint.notice and new.checkpoint.notice != old.checkpoint.notice:
        yield event(Reason.CHECKPOINT_NOTICE, new.checkpoint.notice, warning=True)
    for alert in new.alerts:
        if alert not in old.alerts:
            yield event(Reason(alert.kind), alert.message, warning=True)
    known = {artifact_key(artifact) for artifact in old.artifacts}
    for artifact in new.artifacts:
        if artifact_key(artifact) not in known:
            yield event(Reason.ARTIFACT_WRITTEN, artifact_sentence(artifact))
    if new.evaluation and new.evaluation != old.evaluation:
        yield event(Reason.EVALUATED, evaluation_sentence(new.evaluation))
    unhealthy = find_condition(new, ConditionType.CHECKPOINT_HEALTHY)
    if unhealthy is not None and unhealthy.reason in (Reason.STORAGE_UNAVAILABLE, Reason.CHECKPOINT_OVERDUE):
        seen = find_condition(old, ConditionType.CHECKPOINT_HEALTHY)
        if seen is None or seen.reason != unhealthy.reason:
            yield event(Reason(unhealthy.reason), unhealthy.message, warning=True)
