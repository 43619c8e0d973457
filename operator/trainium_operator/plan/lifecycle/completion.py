"""Complete or fail a job, clean up its pods, delete it after its TTL, and report what delays its deletion.

Guarantees:
- A job is complete only when every member finished; a terminal condition never changes back.
- A completed job kills nothing that may still write. Pods that show what happened are kept for their logs unless the
  job states otherwise: those that have ended, and of a failed job the pod that the verdict names and a few whose agents
  end by themselves with the verdict. A pod that does not end in time is deleted.
- A sidecar holds no node after the end of the job, except in the pod of the failure.
- Only the incarnation and version of the job that this plan observed are deleted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.job import CleanPodPolicy, TrainingJobStatus
from trainium_contract.pages.formatting import pluralize
from trainium_contract.rfc3339 import format_rfc3339, parse_rfc3339
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.failed_spec import FailedSpecStatus, compare_failed_spec, record_failed_spec
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_contract.wire.messages import HeartbeatRequest, WorkerPhase
from trainium_operator.plan.history.interruptions import HISTORY_LENGTH, find_first_rank
from trainium_operator.plan.model.actions import DeleteJob, DeletePod, PolicyResult, build_event
from trainium_operator.plan.model.conditions import is_true, set_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.workers import build_deletion

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.diagnose.failure_policy import StopVerdict
    from trainium_operator.plan.model.observed import Observed
    from trainium_operator.plan.view.context import PlanContext


_MAX_VERDICT_PODS = 3
"""Pods of a failed job that may end by themselves."""
_VERDICT_POD_SECONDS = 15.0
"""Time for an agent to learn that the job has failed, to end, and for its kubelet to report that."""


_FINALIZER_TEXTS = {
    "foregroundDeletion": "its dependents, which are deleted first (foregroundDeletion)",
    "orphan": "its dependents, which are kept (orphan)",
}


def have_all_finished(context: PlanContext) -> bool:
    """Return whether every member of the current generation has finished."""
    return context.current is not None and all(worker is not None and worker.finished for _, worker in context.members)


def rewind_to_end(context: PlanContext) -> PlanContext:
    """Return the context as of the end of the last member, which may be before this operator started."""
    ends = [worker.pod.finished for _, worker in context.members if worker is not None and worker.ended]
    known_ends = [at for at in ends if at is not None]
    if not known_ends or len(known_ends) < len(context.members):
        return context
    ended_at = min(max(*known_ends, context.job.status.goodput.accounted_until or 0.0), context.now)
    return replace(context, observed=replace(context.observed, now=ended_at))


def complete(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Complete the job."""
    step = status.progress.step
    message = f"all {status.progress.total_steps or step} steps are done"
    if not context.job.spec.workload.reports_each_step:
        message = f"the program ended with code 0 on all workers{f', after step {step}' if step else ''}"
    status = set_condition(status, ConditionType.COMPLETE, True, Reason.COMPLETED, message, now=context.now)
    if is_true(status, ConditionType.FAILURE_TARGET):
        kind = ConditionType.FAILURE_TARGET
        status = set_condition(status, kind, False, Reason.COMPLETED, "its ranks finished before", now=context.now)
    status = _set_end(context, status.replaced(phase=Phase.COMPLETED), Reason.COMPLETED)
    return PolicyResult(status=status).combine(clean_up(context, status))


def stop(context: PlanContext, status: TrainingJobStatus, verdict: StopVerdict) -> PolicyResult:
    """Fail the job for good."""
    entry = Interruption(
        generation=status.membership.generation,
        attempt=status.membership.attempt,
        time=format_rfc3339(context.now),
        cause=verdict.cause,
        response=RecoveryResponse.STOP,
        node=verdict.node,
        pod=verdict.pod,
        message=verdict.message,
        step_before=context.last_step,
        rank=find_first_rank(context, verdict.pod),
    )
    status = set_condition(status, ConditionType.FAILED, True, verdict.reason, verdict.message, now=context.now)
    status = status.replaced(
        phase=Phase.FAILED,
        verdict=verdict.message,
        history=(*status.history, entry)[-HISTORY_LENGTH:],
        failed_spec=record_failed_spec(context.job.spec.to_wire()),
    )
    status = _set_end(context, status, verdict.reason)
    return PolicyResult(status=status).combine(clean_up(context, status))


def build_termination_status(observed: Observed) -> TrainingJobStatus:
    """Return the status of a job that is being deleted: the reason for the delay, and only the workers that exist."""
    job, present = observed.job, {pod.uid for pod in observed.pods}
    blockers = [_FINALIZER_TEXTS.get(name, f"finalizer {name}") for name in job.finalizers]
    if observed.pods:
        verb = "is" if len(observed.pods) == 1 else "are"
        blockers.append(f"{pluralize(len(observed.pods), 'pod')} of it {verb} left")
    message = f"the job is being deleted; it waits for: {', '.join(blockers) or 'the API server'}"
    status = job.status.replaced(phase=Phase.TERMINATING)
    for kind in (ConditionType.RUNNING, ConditionType.RECOVERING, ConditionType.RESIZING):
        status = set_condition(status, kind, False, Reason.TERMINATING, message, now=observed.now)
    heartbeats = [agent.heartbeat for uid, agent in observed.agents.items() if uid in present and agent.heartbeat]
    training = sum(heartbeat.phase is WorkerPhase.TRAINING for heartbeat in heartbeats)
    return status.replaced(ready_replicas=training, spares=0)


def record_spec_change(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Report a change of an ended job's spec: it starts nothing, and an event names the command that does."""
    is_known = status.observed_generation == context.job.generation
    status = status.replaced(observed_generation=context.job.generation)
    if is_known or status.phase is not Phase.FAILED:
        return PolicyResult(status=status)
    status = status.replaced(failed_spec=_compare_spec(context, status.failed_spec))
    text = (
        f"The failed job was changed. What it says now counts when it runs again: kubectl trn retry {context.job.name}"
    )
    return PolicyResult(status=status, events=(build_event(Reason.SPEC_CHANGED, text),))


def _compare_spec(context: PlanContext, record: FailedSpecStatus | None) -> FailedSpecStatus | None:
    """Return the difference to the spec that failed; None if this version does not know a field."""
    if record is None:
        return None
    return (
        record.replaced(changes=None)
        if context.job.unknown
        else compare_failed_spec(record, context.job.spec.to_wire())
    )


def clean_up(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Delete what an ended job does not need, by `cleanPodPolicy`; members of a completed job end first."""
    policy = context.job.spec.clean_pod_policy
    if policy is CleanPodPolicy.NONE and is_true(status, ConditionType.FAILURE_TARGET):
        policy = CleanPodPolicy.RUNNING  # a deadline leaves nothing running, whatever is kept
    if policy is CleanPodPolicy.NONE:
        return PolicyResult(status=status)
    is_complete = is_true(status, ConditionType.COMPLETE)
    deadline = 0.0 if is_complete or policy is CleanPodPolicy.ALL else _find_log_deadline(context, status)
    verdict_pod_uids = _list_verdict_pods(context, status) if context.now < deadline else frozenset[str]()
    verdict_pod = "" if is_complete else _find_verdict_pod(status)
    deletions: list[DeletePod] = []
    for uid, worker in context.workers.items():
        is_ending = uid in verdict_pod_uids or (is_complete and uid in context.member_uids and not worker.node_bad)
        if worker.ended:  # a sidecar that never ends must not hold the node; the log of a failure is worth one
            is_kept = worker.pod.name == verdict_pod and not worker.node_bad
            is_deleted = policy is CleanPodPolicy.ALL or (worker.holds_node and not is_kept)
        else:
            is_deleted = not is_ending
        if is_deleted:
            deletions += build_deletion(worker, force=worker.node_bad)
    return PolicyResult(status=status, actions=tuple(deletions), requeue_at=(deadline,) if verdict_pod_uids else ())


def _list_verdict_pods(context: PlanContext, status: PublicStatus) -> frozenset[str]:
    """Return pods that end by themselves with a verdict, by uid; the one that the job's verdict names first."""
    verdict_pod = _find_verdict_pod(status)
    ending = [
        worker.pod
        for worker in context.workers.values()
        if not (worker.ended or worker.pod.deleting or worker.node_bad) and _ends_by_itself(worker.heartbeat)
    ]
    return frozenset(
        pod.uid for pod in sorted(ending, key=lambda pod: (pod.name != verdict_pod, pod.ordinal))[:_MAX_VERDICT_PODS]
    )


def _find_verdict_pod(status: PublicStatus) -> str:
    return status.history[-1].pod if status.history else ""


def _ends_by_itself(heartbeat: HeartbeatRequest | None) -> bool:
    return heartbeat is not None and heartbeat.phase is WorkerPhase.FAILED and heartbeat.verdict is not None


def _find_log_deadline(context: PlanContext, status: PublicStatus) -> float:
    """Return until when such pods may run (Unix seconds).

    0 if the end lies in the future, because a clock was set back.
    """
    ended_at = parse_rfc3339(status.completion_time)
    return 0.0 if ended_at is None or ended_at > context.now else ended_at + _VERDICT_POD_SECONDS


def _set_end(context: PlanContext, status: TrainingJobStatus, reason: Reason) -> TrainingJobStatus:
    ended_conditions = (
        ConditionType.RUNNING,
        ConditionType.RECOVERING,
        ConditionType.RESIZING,
        ConditionType.PODS_READY,
    )
    for kind in (*ended_conditions, ConditionType.ADMITTED):
        status = set_condition(status, kind, False, reason, "the job has ended", now=context.now)
    return status.replaced(
        completion_time=format_rfc3339(context.now),
        ready_replicas=0,
        spares=0,
        waiting_since=None,
        goodput=status.goodput.replaced(accounted_until=None),
    )


def delete_after_ttl(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Delete an ended job when its TTL has passed, else requeue it for that time."""
    ttl = context.job.spec.ttl_seconds_after_finished
    if ttl is None:
        return PolicyResult(status=status)
    ended_at = parse_rfc3339(status.completion_time)
    if ended_at is None:
        # Lost or edited: the time restarts, so that the job is not deleted at once.
        status = status.replaced(completion_time=format_rfc3339(context.now))
        ended_at = context.now
    # An end in the future (a clock that was set back) delays the deletion by at most the TTL.
    delete_at = min(ended_at, context.now) + ttl
    if context.now < delete_at or status != context.job.status:
        return PolicyResult(status=status, requeue_at=(max(delete_at, context.now),))
    return PolicyResult(status=status, actions=(DeleteJob(context.job.uid, context.job.resource_version),))
