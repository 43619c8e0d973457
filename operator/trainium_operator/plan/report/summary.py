"""Derive the status that people and tools read: counts, progress, checkpoints, conditions, and the phase.

The conditions Ready, Stalled and Finished are for tools that do not know TrainingJobs (kstatus, Argo CD, kubectl
wait). Workers that were created from an earlier pod template keep running; status and an event count them.

Guarantees:
- Ready, Stalled and Finished follow from the phase and the other conditions alone. Finished is True at both ends;
  Stalled is True only where nothing changes until a person acts.
- No running worker is restarted because the job's template, or the operator's part of it, has changed.
- Compiled sizes are kept only of a job that compiles ahead, only sizes that it may have, and forgotten with the last
  pod of a suspended job, because what it computes may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.node_polarity import Severity
from trainium_contract.pages.formatting import pluralize
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.sizes import MAX_COMPILED
from trainium_contract.status import public
from trainium_contract.status.conditions import ConditionStatus, ConditionType, Phase
from trainium_contract.status.interruptions import PLANNED_RESPONSES, RecoveryResponse
from trainium_contract.status.results import Alert, StepFigures
from trainium_contract.wire.messages import AlertKind, HeartbeatRequest, Member, Progress, WorkerPhase
from trainium_operator.plan.manifests.worker_pod import compute_template_hash, is_outdated
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import Event, PolicyResult, build_event
from trainium_operator.plan.model.conditions import StatusT, find_condition, is_true, set_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.pods.gang_policy import set_admitted
from trainium_operator.plan.report.checkpoint_health import set_checkpoint_health
from trainium_operator.plan.report.goodput import update_goodput
from trainium_operator.plan.report.missing_workers import find_slow_start_times, set_pods_ready
from trainium_operator.plan.report.run_results import describe_activity, record_results
from trainium_operator.plan.view.context import (
    PlanContext,
    select_current_heartbeats,
)
from trainium_operator.plan.view.progress import count_total_steps, sort_by_steps
from trainium_operator.plan.view.workers import RECONNECT_SECONDS

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.faults.node_signals import NodeProblem


_MAX_NODES_SHOWN = 3
_DECIMALS = {"learning_rate": 12, "tokens_per_second": 1, "samples_per_second": 3, "reward_accuracy": 4}
"""Decimals of the figures that a person reads, where they are not six."""


def set_nodes_healthy(context: PlanContext, status: StatusT) -> StatusT:
    """Set the condition; it stays unchanged while no node is known."""
    if context.lost_contact:
        kind, reason = ConditionType.NODES_HEALTHY, Reason.CONTACT_LOST
        return set_condition(status, kind, None, reason, context.lost_contact, now=context.now)
    if not context.observed.nodes:
        return status
    freeze_reason = context.observed.fleet.frozen
    problems: dict[str, NodeProblem] = {}
    for uid, problem in context.node_problems.items():
        problems.setdefault(context.workers[uid].pod.node, problem)
    if not problems:
        reason = Reason.NODE_ACTIONS_FROZEN if freeze_reason else Reason.NODES_HEALTHY
        message = freeze_reason or "nothing is wrong with the nodes in use"
        return set_condition(status, ConditionType.NODES_HEALTHY, True, reason, message, now=context.now)
    nodes = sorted(problems, key=lambda node: (-problems[node].severity, node))
    described = "; ".join(_format_problem(node, problems[node]) for node in nodes[:_MAX_NODES_SHOWN])
    suffix = f"; and {len(nodes) - _MAX_NODES_SHOWN} more nodes" if len(nodes) > _MAX_NODES_SHOWN else ""
    reason = Reason.NODE_ACTIONS_FROZEN if freeze_reason else Reason.NODE_UNHEALTHY
    message = f"{described}{suffix}. {freeze_reason}" if freeze_reason else described + suffix
    return set_condition(status, ConditionType.NODES_HEALTHY, False, reason, message, now=context.now)


def _format_problem(node: str, problem: NodeProblem) -> str:
    since = f" since {format_rfc3339(problem.since)}" if problem.since is not None else ""
    reactions = {
        Severity.FATAL: "its workers are replaced",
        Severity.DRAIN: "its workers are handed over",
        Severity.SUSPECT: "other nodes are preferred",
    }
    return f"{node}: {problem}{since} ({problem.cause.value}; {reactions[problem.severity]})"


def record_compiled_sizes(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """Update the compiled sizes; return the same status if none is new."""
    if not context.job.spec.workload.compile_command or not context.workers:
        return status.replaced(compiled=public.CompiledStatus()) if status.compiled.sizes else status
    reports = [
        report for worker in context.workers.values() if worker.heartbeat for report in worker.heartbeat.compiled
    ]
    # Workers that exist when the requested size changes have not compiled the new one.
    known_sizes = dict.fromkeys(
        (*(status.compiled.sizes or _list_compiled_first(context)), *_find_stepped_size(context))
    )
    workers = context.job.spec.workers
    max_size = max(workers.replicas, workers.max_replicas or 0)
    new_reports = [
        report
        for report in reports
        if report.nodes not in known_sizes
        and report.nodes <= max_size
        and context.size.count_micro_batches(report.nodes)
    ]
    sizes = tuple(dict.fromkeys((*known_sizes, *(report.nodes for report in new_reports))))[:MAX_COMPILED]
    seconds = max(
        (*(report.seconds for report in new_reports if report.nodes in sizes), status.compiled.seconds or 0.0)
    )
    return status.replaced(compiled=public.CompiledStatus(sizes=sizes, seconds=round(seconds, 1) if seconds else None))


def _list_compiled_first(context: PlanContext) -> tuple[int, ...]:
    """Return the sizes that all members compiled before they joined; none before the first generation."""
    return () if context.current is None else context.size.compiled_first


def _find_stepped_size(context: PlanContext) -> tuple[int, ...]:
    """Return the current size after its first step; none before."""
    progress = context.newest_progress if context.current is not None else None
    has_stepped = progress is not None and progress.step > (progress.resume_step or 0)
    return (len(context.members),) if has_stepped else ()


def count_outdated_pods(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Count outdated pods; report them when there are some for the first time since there were none."""
    running = [worker for worker in context.workers.values() if not worker.ended and worker.pod.template_hash]
    current_hash = compute_template_hash(context.job, context.settings) if running else ""
    outdated = sum(is_outdated(worker.pod.template_hash, current_hash) for worker in running)
    events: tuple[Event, ...] = ()
    if outdated and not status.outdated_pods:
        note = (
            f"{outdated} of {len(running)} workers have an earlier pod template and continue unchanged; new pods have "
            "the new one. To update all, suspend the job and resume it."
        )
        events = (build_event(Reason.TEMPLATE_CHANGED, note),)
    return PolicyResult(status=status.replaced(outdated_pods=outdated), events=events)


_PHASE_REASONS: dict[Phase, Reason] = {
    Phase.PENDING: Reason.NOT_STARTED,
    Phase.STARTING: Reason.STARTING,
    Phase.RECOVERING: Reason.INTERRUPTED,
    Phase.RESIZING: Reason.SIZE_REQUESTED,
    Phase.SUSPENDING: Reason.SUSPENDING,
    Phase.SUSPENDED: Reason.SUSPENDED,
    Phase.STOPPING: Reason.STOPPING,
    Phase.TERMINATING: Reason.TERMINATING,
}
_WAITING_PHASES = frozenset({Phase.PENDING, Phase.STARTING})
_WAITING_CONDITIONS = (
    ConditionType.SIZE_LEGAL,
    ConditionType.PODS_READY,
    ConditionType.ADMITTED,
    ConditionType.ROLES_READY,
)
_GENERAL_REASONS = frozenset({Reason.WAITING_FOR_WORKERS, Reason.WAITING_FOR_GANG})
_BLOCKING_REASONS = frozenset(
    {Reason.NO_LEGAL_SIZE, Reason.INVALID_SPEC, Reason.GANG_API_MISSING, Reason.DEVICE_API_MISSING, Reason.NAME_TAKEN}
)


def set_standard_conditions(status: StatusT, now: float) -> StatusT:
    """Set the three conditions; call when all others are set."""
    failed = find_condition(status, ConditionType.FAILED)
    if failed is not None and failed.status is ConditionStatus.TRUE:
        reason = Reason(failed.reason)
        status = set_condition(status, ConditionType.READY, False, reason, failed.message, now=now)
        status = set_condition(status, ConditionType.STALLED, True, reason, failed.message, now=now)
        return set_condition(status, ConditionType.FINISHED, True, reason, "the job has failed", now=now)
    if is_true(status, ConditionType.COMPLETE):
        text = "the job has completed"
        status = set_condition(status, ConditionType.READY, True, Reason.COMPLETED, text, now=now)
        status = set_condition(status, ConditionType.STALLED, False, Reason.COMPLETED, "", now=now)
        return set_condition(status, ConditionType.FINISHED, True, Reason.COMPLETED, text, now=now)
    reason, message = _explain_phase(status)
    status = set_condition(status, ConditionType.READY, reason is Reason.TRAINING, reason, message, now=now)
    blocked = next(
        (condition for condition in status.conditions if _is_blocking(condition.status, condition.reason)), None
    )
    stalled_reason, message = (Reason(blocked.reason), blocked.message) if blocked else (Reason.PROGRESSING, "")
    status = set_condition(status, ConditionType.STALLED, blocked is not None, stalled_reason, message, now=now)
    return set_condition(status, ConditionType.FINISHED, False, Reason.PROGRESSING, "", now=now)


def _explain_phase(status: StatusT) -> tuple[Reason, str]:
    """Return why the job is in its phase: of a job that waits, the reason of what it waits for."""
    reason = _PHASE_REASONS.get(status.phase, Reason.TRAINING)
    if status.phase in _WAITING_PHASES:
        conditions = (find_condition(status, kind) for kind in _WAITING_CONDITIONS)
        waits = [
            condition for condition in conditions if condition is not None and condition.status is ConditionStatus.FALSE
        ]
        specific = next((wait for wait in waits if wait.reason not in _GENERAL_REASONS), waits[0] if waits else None)
        if specific is not None:
            return Reason(specific.reason), specific.message
    return reason, "" if reason is Reason.TRAINING else "see the phase"


def _is_blocking(state: ConditionStatus, reason: str) -> bool:
    return state is ConditionStatus.FALSE and reason in _BLOCKING_REASONS


_ALERTS = frozenset(AlertKind)


def summarize(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Compute the status; call after the policies."""
    if not have_members_reported(context):
        return PolicyResult(status=status)
    status = _set_counts(context, status)
    status = _set_progress(context, status)
    status = set_pods_ready(context, status)
    status = set_admitted(context, status)
    status = _set_running(context, status)
    status = _set_recovering(context, status)
    status = _set_resizing(context, status)
    status, requeue_at = set_checkpoint_health(context, status)
    steady_from = context.steady_time
    if steady_from is not None and not status.start_time:
        requeue_at = (*requeue_at, steady_from)
    requeue_at = (*requeue_at, *find_slow_start_times(context))
    return PolicyResult(status=status.replaced(phase=_derive_phase(context, status)), requeue_at=requeue_at)


def have_members_reported(context: PlanContext) -> bool:
    """Return False just after a start of the operator, while members have not reported yet."""
    if context.current is None or context.now >= context.observed.coordinator_since + RECONNECT_SECONDS:
        return True
    agents = context.observed.agents
    return all(uid in agents and agents[uid].heartbeat is not None for uid in context.member_uids)


def _set_counts(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    training = sum(heartbeat.phase is WorkerPhase.TRAINING for _, heartbeat in context.heartbeats)
    return status.replaced(
        replicas=len(context.current.members) if context.current else 0,
        ready_replicas=training,
        spares=len(context.candidates),
        membership=_set_relative_throughput(context, status),
        selector=names.format_selector(context.job.name),
    )


def _set_relative_throughput(context: PlanContext, status: public.PublicStatus) -> public.MembershipStatus:
    """Return the relative throughput of the current size, and the warm workers that it leaves out."""
    size, reserve = status.membership.size, status.membership.reserve
    if context.current is not None and context.current.generation == status.membership.generation:
        reserve = max(0, len(context.candidates) - context.job.spec.workers.spares)
    passes, batch, speed = (
        context.size.count_micro_batches(size),
        context.size.compute_batch(size),
        round(context.size.compute_speed(size), 3),
    )
    return status.membership.replaced(passes=passes, batch=batch, speed=speed, reserve=reserve)


def _set_progress(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    heartbeats = sort_by_steps(context.job.spec, _list_newest_heartbeats(context))
    reports = [heartbeat.progress for _, heartbeat in heartbeats if heartbeat.progress is not None]
    if reports:
        newest = reports[0]
        # A program that was restarted has reported no step yet, and may end without one more.
        if context.job.spec.workload.reports_each_step or newest.step > 0:
            status = status.replaced(progress=_build_progress_status(context, status, newest))
        status = status.replaced(
            alerts=_merge_alerts(status.alerts, newest),
            checkpoint=_merge_checkpoints(context, status.checkpoint, reports),
        )
        status = status.replaced(committed_step=status.checkpoint.durable_step)
        status = record_results(context, status, reports).replaced(hang_detection=newest.hang_detection)
        status = _set_progress_reported(context, status, reports)
    steady_from = context.steady_time
    has_stepped = any(report.step > 0 for report in reports) or (steady_from is not None and context.now >= steady_from)
    if not status.start_time and has_stepped:
        status = status.replaced(start_time=format_rfc3339(context.now))
    return update_goodput(context, status)


def _build_progress_status(
    context: PlanContext, status: public.PublicStatus, newest: Progress
) -> public.ProgressStatus:
    figures = {name: getattr(newest, name) for name in StepFigures.model_fields}
    rounded = {name: round(value, _DECIMALS.get(name, 6)) for name, value in figures.items() if value is not None}
    has_moved = newest.step != status.progress.step or not status.progress.updated
    return public.ProgressStatus(
        **{**rounded, "total_steps": count_total_steps(context.job, newest)},
        updated=format_rfc3339(context.now) if has_moved else status.progress.updated,
    )


def _set_progress_reported(context: PlanContext, status: StatusT, reports: list[Progress]) -> StatusT:
    """Set the condition whether the progress of a program can be read."""
    if context.job.spec.workload.reports_each_step:
        return status
    kind, problem = ConditionType.PROGRESS_REPORTED, next((report.problem for report in reports if report.problem), "")
    if problem:
        return set_condition(status, kind, False, Reason.PROGRESS_UNREADABLE, problem, now=context.now)
    if context.has_reported_steps:
        return set_condition(status, kind, True, Reason.PROGRESS_REPORTED, "steps are reported", now=context.now)
    message = "no step was reported yet: give program.progress.pattern, or report steps with trainium_worker"
    return set_condition(status, kind, None, Reason.NO_STEP_REPORTED, message, now=context.now)


def _list_newest_heartbeats(context: PlanContext) -> tuple[tuple[Member, HeartbeatRequest], ...]:
    """Return the members' heartbeats; of a suspended job the last ones, which report their last save."""
    recorded = context.observed.membership
    return (
        select_current_heartbeats(context.observed, recorded)
        if context.current is None and recorded is not None
        else context.heartbeats
    )


def _merge_alerts(old: tuple[Alert, ...], newest: Progress) -> tuple[Alert, ...]:
    """Return the newest alert of each kind; a resumed run that repeats a step reports nothing new."""
    by_kind = {alert.kind: alert for alert in old}
    for alert in newest.alerts:
        known_alert = by_kind.get(alert.kind)
        if alert.kind in _ALERTS and (known_alert is None or known_alert.step != alert.step):
            by_kind[alert.kind] = alert
    return tuple(by_kind.values())


def _merge_checkpoints(
    context: PlanContext, old: public.CheckpointStatus, reports: list[Progress]
) -> public.CheckpointStatus:
    """Return the step that every member holds in memory, and the newest committed one, which never decreases."""
    is_complete = context.current is not None and len(reports) == len(context.current.members)
    memory_step = min(report.memory_step for report in reports) if is_complete else old.memory_step
    total = count_total_steps(context.job, reports[0])
    known_step = old.durable_step if not total or old.durable_step <= total else -1
    durable_step = max(known_step, *(report.durable_step for report in reports))
    durable_time = format_rfc3339(context.now) if durable_step > known_step else old.durable_time
    notices = [report.notice for report in reports if report.notice]
    notice = notices[0] if notices else old.notice
    return public.CheckpointStatus(
        memory_step=memory_step, durable_step=durable_step, durable_time=durable_time, notice=notice
    )


def _set_running(context: PlanContext, status: StatusT) -> StatusT:
    kind = ConditionType.RUNNING
    if context.is_settled:
        message = f"{describe_activity(status)} on {pluralize(status.replicas, 'node')}"
        return set_condition(status, kind, True, Reason.TRAINING, message, now=context.now)
    if context.current is None:
        return set_condition(status, kind, False, Reason.NOT_STARTED, "no generation is in force", now=context.now)
    if status.list_open_interruptions():
        return set_condition(status, kind, False, Reason.INTERRUPTED, "see the condition Recovering", now=context.now)
    if not is_true(status, kind):
        return set_condition(status, kind, False, Reason.STARTING, "workers are joining or loading", now=context.now)
    return status


def _set_recovering(context: PlanContext, status: StatusT) -> StatusT:
    kind = ConditionType.RECOVERING
    faults = [entry for entry in status.list_open_interruptions() if entry.response not in PLANNED_RESPONSES]
    if not faults:
        return set_condition(status, kind, False, Reason.NO_INTERRUPTION, "", now=context.now)
    return set_condition(status, kind, True, Reason.INTERRUPTED, faults[-1].message, now=context.now)


def _set_resizing(context: PlanContext, status: StatusT) -> StatusT:
    if context.current is None:
        return status
    kind, present, desired = ConditionType.RESIZING, len(context.current.members), status.desired
    is_requested = is_true(status, kind)
    if present == desired and not any(
        entry.response is RecoveryResponse.RESIZE for entry in status.list_open_interruptions()
    ):
        return set_condition(status, kind, False, Reason.AT_SIZE, pluralize(present, "node"), now=context.now)
    if is_requested or present >= desired:
        return status
    message = f"training on {present} of {desired} nodes until more workers are there"
    return set_condition(status, kind, False, Reason.CAPACITY_MISSING, message, now=context.now)


def _derive_phase(context: PlanContext, status: public.PublicStatus) -> Phase:
    if is_true(status, ConditionType.FAILURE_TARGET):
        return Phase.STOPPING
    if context.job.spec.suspend:
        return Phase.SUSPENDED if is_true(status, ConditionType.SUSPENDED) else Phase.SUSPENDING
    if context.current is None and status.membership.size == 0:
        return Phase.PENDING
    if is_true(status, ConditionType.RECOVERING):
        return Phase.RECOVERING
    if is_true(status, ConditionType.RESIZING) or status.list_open_interruptions():
        return Phase.RESIZING
    return Phase.RUNNING if is_true(status, ConditionType.RUNNING) else Phase.STARTING
