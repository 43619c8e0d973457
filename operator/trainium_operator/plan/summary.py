"""The status that people read: counts, progress, checkpoints, conditions, and the phase that follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.job import (
    AlertStatus,
    CheckpointStatus,
    ConditionType,
    Interruption,
    Phase,
    ProgressStatus,
    Rung,
    TrainingJobStatus,
)
from trainium_contract.messages import AlertKind, Progress, WorkerPhase
from trainium_operator.plan import names
from trainium_operator.plan.checkpoint_health import judge_checkpoints
from trainium_operator.plan.conditions import is_true
from trainium_operator.plan.gang import note_admission
from trainium_operator.plan.generation import is_settled
from trainium_operator.plan.goodput import account
from trainium_operator.plan.model import STARTING_REASONS, PodPhase
from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.sentences import listed
from trainium_operator.plan.times import rfc3339

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts

_ALERTS = frozenset(AlertKind)


def summarise(facts: Facts, draft: Draft) -> None:
    """Fill in everything that is derived; call after the policies."""
    if not _hears_again(facts):
        return
    _counts(facts, draft)
    _progress(facts, draft)
    _pods_ready(facts, draft)
    note_admission(facts, draft)
    _running(facts, draft)
    _recovering(draft)
    _resizing(facts, draft)
    judge_checkpoints(facts, draft)
    draft.update(phase=_phase(facts, draft))


def only_counts_differ(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether nothing but counts of workers, with the sentences that tell them, and progress has changed."""
    before = {condition.type: condition for condition in old.conditions}
    told = tuple(
        condition.model_copy(update={"message": before[condition.type].message})
        if condition.type in before
        else condition
        for condition in new.conditions
    )
    counts = {"ready_replicas": old.ready_replicas, "spares": old.spares, "conditions": told}
    return only_progress_differs(old, new.model_copy(update=counts))


def only_progress_differs(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether a status write could wait: nothing but progress, checkpoints and goodput has changed."""
    moving = {"progress": old.progress, "goodput": old.goodput, "checkpoint": old.checkpoint}
    same = len(old.history) == len(new.history)
    history = zip(old.history, new.history, strict=True) if same else ()
    charged = tuple(now.model_copy(update={"stages": before.stages}) for before, now in history)
    return new.model_copy(update={**moving, "history": charged if same else new.history}) == old


def _hears_again(facts: Facts) -> bool:
    """False just after a start of the operator, while members have not called yet: what was known still stands."""
    if facts.current is None or facts.now >= facts.observed.coordinator_since + facts.settings.reconnect_seconds:
        return True
    agents = facts.observed.agents
    return all(uid in agents and agents[uid].heartbeat is not None for uid in facts.member_uids)


def _counts(facts: Facts, draft: Draft) -> None:
    training = sum(beat.phase is WorkerPhase.TRAINING for _, beat in facts.beats)
    draft.update(
        replicas=len(facts.current.members) if facts.current else 0,
        ready_replicas=training,
        spares=len(facts.candidates),
        selector=names.selector(facts.job.name),
    )


def _progress(facts: Facts, draft: Draft) -> None:
    reports = [beat.progress for _, beat in facts.beats if beat.progress is not None]
    status = draft.status
    if reports:
        newest = reports[0]
        moved = newest.step != status.progress.step or not status.progress.updated
        draft.update(
            progress=ProgressStatus(
                step=newest.step,
                total_steps=facts.job.spec.trainer.steps,
                loss=_rounded(newest.loss, 6),
                tokens_per_second=_rounded(newest.tokens_per_second, 1),
                updated=rfc3339(facts.now) if moved else status.progress.updated,
            ),
            alerts=_newest_alerts(status.alerts, newest),
            checkpoint=_newest_checkpoints(facts, status.checkpoint, reports),
        )
    if not status.start_time and any(report.step > 0 for report in reports):
        draft.update(start_time=rfc3339(facts.now))
    account(facts, draft)


def _newest_alerts(old: tuple[AlertStatus, ...], newest: Progress) -> tuple[AlertStatus, ...]:
    """Of each kind the newest; a run that is resumed and comes to the same step again has nothing new to tell."""
    known = {alert.kind: alert for alert in old}
    for alert in newest.alerts:
        before = known.get(alert.kind)
        if alert.kind in _ALERTS and (before is None or before.step != alert.step):
            known[alert.kind] = AlertStatus(kind=alert.kind, step=alert.step, message=alert.message)
    return tuple(known.values())


def _newest_checkpoints(facts: Facts, old: CheckpointStatus, reports: list[Progress]) -> CheckpointStatus:
    """In memory: the step that every member holds. Durable: committed steps never go back."""
    complete = facts.current is not None and len(reports) == len(facts.current.members)
    memory = min(report.memory_step for report in reports) if complete else old.memory_step
    durable = max(old.durable_step, *(report.durable_step for report in reports))
    since = rfc3339(facts.now) if durable > old.durable_step else old.durable_time
    notices = [report.notice for report in reports if report.notice]
    notice = notices[0] if notices else old.notice
    return CheckpointStatus(memory_step=memory, durable_step=durable, durable_time=since, notice=notice)


def _rounded(value: float | None, digits: int) -> float | None:
    """As many digits as a person reads."""
    return None if value is None else round(value, digits)


def _pods_ready(facts: Facts, draft: Draft) -> None:
    desired = draft.status.desired
    members = facts.member_uids
    there = sum(
        worker.alive and worker.agent is not None and worker.pod.phase is PodPhase.RUNNING
        for worker in facts.workers.values()
        if not worker.finished
    ) + sum(worker.finished for uid, worker in facts.workers.items() if uid in members)
    if there >= desired:
        draft.condition(ConditionType.PODS_READY, True, Reason.ALL_READY, f"{desired} workers are registered")
        return
    reason, why = _missing(facts)
    draft.condition(ConditionType.PODS_READY, False, reason, f"{there} of {desired} workers are registered. {why}")


def _missing(facts: Facts) -> tuple[Reason, str]:
    unschedulable = [worker.pod for worker in facts.workers.values() if worker.pod.unschedulable_message]
    if unschedulable:
        pods = listed(tuple(pod.name for pod in unschedulable))
        return Reason.UNSCHEDULABLE, f"{pods} cannot be scheduled: {unschedulable[0].unschedulable_message}"
    waiting = [
        worker.pod
        for worker in facts.workers.values()
        if worker.pod.phase in (PodPhase.PENDING, PodPhase.FAILED) and worker.pod.reason
    ]
    troubled = [pod for pod in waiting if pod.reason not in STARTING_REASONS]
    if troubled:
        pod = troubled[-1]
        return Reason.WORKER_NOT_STARTING, f"{pod.name} on node {pod.node}: {pod.reason} {pod.message}"
    return Reason.WAITING_FOR_WORKERS, ""


def _running(facts: Facts, draft: Draft) -> None:
    if is_settled(facts):
        size = draft.status.replicas
        draft.condition(ConditionType.RUNNING, True, Reason.TRAINING, f"training on {size} nodes")
    elif facts.current is None:
        draft.condition(ConditionType.RUNNING, False, Reason.NOT_STARTED, "no generation is in force")
    elif _open_entries(draft):
        draft.condition(ConditionType.RUNNING, False, Reason.INTERRUPTED, "see the condition Recovering")
    elif not is_true(draft.status, ConditionType.RUNNING):
        draft.condition(ConditionType.RUNNING, False, Reason.STARTING, "workers are joining or loading")


def _recovering(draft: Draft) -> None:
    faults = [entry for entry in _open_entries(draft) if entry.rung not in (Rung.RESIZE, Rung.GROW)]
    if faults:
        draft.condition(ConditionType.RECOVERING, True, Reason.INTERRUPTED, faults[-1].message)
    else:
        draft.condition(ConditionType.RECOVERING, False, Reason.NO_INTERRUPTION, "")


def _resizing(facts: Facts, draft: Draft) -> None:
    if facts.current is None:
        return
    present, desired = len(facts.current.members), draft.status.desired
    requested = is_true(draft.status, ConditionType.RESIZING)
    if present == desired and not any(entry.rung is Rung.RESIZE for entry in _open_entries(draft)):
        draft.condition(ConditionType.RESIZING, False, Reason.AT_SIZE, f"{present} nodes")
    elif not requested and present < desired:
        message = f"training on {present} of {desired} nodes until more workers are there"
        draft.condition(ConditionType.RESIZING, False, Reason.CAPACITY_MISSING, message)


def _phase(facts: Facts, draft: Draft) -> Phase:
    status = draft.status
    if facts.job.spec.suspend:
        return Phase.SUSPENDED if is_true(status, ConditionType.SUSPENDED) else Phase.SUSPENDING
    if facts.current is None and status.membership.size == 0:
        return Phase.PENDING
    if is_true(status, ConditionType.RECOVERING):
        return Phase.RECOVERING
    if is_true(status, ConditionType.RESIZING) or _open_entries(draft):
        return Phase.RESIZING
    return Phase.RUNNING if is_true(status, ConditionType.RUNNING) else Phase.STARTING


def _open_entries(draft: Draft) -> list[Interruption]:
    return [entry for entry in draft.status.history if entry.recovered_seconds is None and entry.rung is not Rung.STOP]
