"""Release the pods of a job that is suspended, not admitted by its queue, or past a deadline.

The ranks save and leave, the nodes are released, and the generation ends. The clock of the deadlines runs while the job
is active and restarts with each resumption, as for a batch/v1 Job; time in a queue does not count. When a deadline
passes, the condition FailureTarget reports it first; Failed follows when the last worker has ended.

Guarantees:
- Clock and decision are in the status: neither a restart of the operator nor a later change of the spec reverts them.
- Reports count until the last worker has ended, so the status shows the last save.
- A job whose ranks all finish meanwhile is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.pages.formatting import pluralize
from trainium_contract.status.activity import ActivityStatus
from trainium_contract.status.conditions import ConditionStatus, ConditionType, Phase
from trainium_contract.status.start_failures import StartFailuresStatus
from trainium_operator.plan.diagnose.failure_policy import StopVerdict
from trainium_operator.plan.faults.failure_budgets import list_avoided_nodes
from trainium_operator.plan.lifecycle.completion import stop
from trainium_operator.plan.model.actions import PolicyResult
from trainium_operator.plan.model.conditions import StatusT, find_condition, is_true, set_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import format_sentence
from trainium_operator.plan.view.context import count_other_pods
from trainium_operator.plan.view.workers import build_deletion

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.view.context import PlanContext


def delete_workers(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Delete all pods; on SIGTERM the ranks save and leave."""
    membership = status.membership.replaced(size=0, data_parallel=0)
    avoided_nodes = list_avoided_nodes(status.failures, context.now)  # without those that refused
    status = status.replaced(
        membership=membership, waiting_since=None, start_failures=StartFailuresStatus(), avoided_nodes=avoided_nodes
    )
    workers = context.workers.values()
    deletions = tuple(action for worker in workers for action in build_deletion(worker, force=worker.node_bad))
    return PolicyResult(status=status, actions=deletions)


def suspend(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Release everything, and report it."""
    released = delete_workers(context, status)
    status, workers, kind = released.status, context.workers.values(), ConditionType.SUSPENDED
    if workers:
        verbs = "saves and leaves" if len(workers) == 1 else "save and leave"
        message = f"{pluralize(len(workers), 'worker')} {verbs}"
        status = set_condition(status, kind, False, Reason.SUSPENDING, message, now=context.now)
    elif others := count_other_pods(context):
        message = f"{pluralize(others, 'pod')} of its roles {'leaves' if others == 1 else 'leave'}"
        status = set_condition(status, kind, False, Reason.SUSPENDING, message, now=context.now)
    else:
        status = set_condition(status, kind, True, Reason.SUSPENDED, "all nodes are released", now=context.now)
    status = set_condition(status, ConditionType.RESIZING, False, Reason.SUSPENDED, "", now=context.now)
    return released.replace_status(status)


def clear_suspended(context: PlanContext, status: StatusT) -> StatusT:
    """Report that the job is not suspended."""
    return set_condition(status, ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED, "", now=context.now)


_ADVICE = {
    Reason.DEADLINE_EXCEEDED: "Raise spec.activeDeadlineSeconds and run the job again (kubectl trn retry).",
    Reason.STARTUP_DEADLINE_EXCEEDED: "Remove what holds the workers up, or raise spec.startupDeadlineSeconds, and "
    "run the job again (kubectl trn retry).",
}


def is_ending(status: PublicStatus) -> bool:
    """Return whether a deadline has decided the end of the job."""
    return is_true(status, ConditionType.FAILURE_TARGET)


def watch_deadlines(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Update the clock; decide on the end when a deadline has passed, else requeue for it."""
    status = status.replaced(activity=_update_activity(context, status))
    since, spec = status.activity.since, context.job.spec
    if since is None:
        return PolicyResult(status=status)
    requeue_at: list[float] = []
    for reason, limit in (
        (Reason.DEADLINE_EXCEEDED, spec.active_deadline_seconds),
        (Reason.STARTUP_DEADLINE_EXCEEDED, None if status.activity.stepped else spec.startup_deadline_seconds),
    ):
        if limit is None:
            continue
        if context.now >= since + limit:
            message = _describe_deadline(status, reason, limit)
            kind = ConditionType.FAILURE_TARGET
            return PolicyResult(status=set_condition(status, kind, True, reason, message, now=context.now))
        requeue_at.append(since + limit)
    return PolicyResult(status=status, requeue_at=tuple(requeue_at))


def stop_after_deadline(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Ask every worker to save and leave; fail the job when none runs any more. Call when it `is_ending`."""
    running = [worker for worker in context.workers.values() if not worker.ended]
    if not running:
        return stop(context, status, _build_deadline_verdict(status))
    deletions = tuple(action for worker in running for action in build_deletion(worker, force=worker.node_bad))
    return PolicyResult(status=status.replaced(phase=Phase.STOPPING, waiting_since=None), actions=deletions)


def _update_activity(context: PlanContext, status: TrainingJobStatus) -> ActivityStatus:
    evicted = context.grant is not None and context.grant.releases_workers
    if context.job.spec.suspend or evicted or _waits_for_queue(status):
        return ActivityStatus()
    since = context.now if status.activity.since is None else status.activity.since
    return ActivityStatus(since=since, stepped=status.activity.stepped or context.has_stepped)


def _waits_for_queue(status: PublicStatus) -> bool:
    admitted = find_condition(status, ConditionType.ADMITTED)
    return status.membership.size == 0 and admitted is not None and admitted.reason == Reason.WAITING_FOR_QUEUE


def _describe_deadline(status: PublicStatus, reason: Reason, limit: int) -> str:
    if reason is Reason.DEADLINE_EXCEEDED:
        return f"The job has been active for {limit} s, as long as activeDeadlineSeconds allows."
    kinds = (ConditionType.PODS_READY, ConditionType.ADMITTED, ConditionType.ROLES_READY, ConditionType.RUNNING)
    conditions = (find_condition(status, kind) for kind in kinds)
    unmet_conditions = (
        condition for condition in conditions if condition is not None and condition.status is ConditionStatus.FALSE
    )
    reason_text = next((condition.message for condition in unmet_conditions if condition.message), "")
    suffix = f": {reason_text.rstrip('. ')}" if reason_text else ""
    return f"The job has made no step within {limit} s, as long as startupDeadlineSeconds allows{suffix}."


def _build_deadline_verdict(status: PublicStatus) -> StopVerdict:
    target = find_condition(status, ConditionType.FAILURE_TARGET)
    # A person may have edited the reason; the job ends in any case.
    reason = Reason.DEADLINE_EXCEEDED if target is None or target.reason not in _ADVICE else Reason(target.reason)
    text = "" if target is None else target.message
    step = status.checkpoint.durable_step
    saved = f"Its newest durable checkpoint is step {step}." if step >= 0 else "It has no durable checkpoint."
    message = format_sentence(f"{text} {saved} {_ADVICE[reason]}")
    return StopVerdict(reason=reason, cause=Cause.YIELDED, message=message)
