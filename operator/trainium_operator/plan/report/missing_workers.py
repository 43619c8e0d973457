"""Set the condition PodsReady, and explain why workers are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import pluralize
from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.manifests.worker_pod import PRECOMPILE_CONTAINER
from trainium_operator.plan.model.conditions import set_condition
from trainium_operator.plan.model.observed import STARTING_REASONS, PodPhase, PodView
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import format_names
from trainium_operator.plan.pods.refused_pods import describe_start_failures
from trainium_operator.plan.view.context import PlanContext, describe_creation_refusal, find_creation_blocker

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus

SLOW_INIT_SECONDS = 120.0
"""A user's init container that runs for longer is reported as the reason why the worker does not start."""


UNANSWERED_SECONDS = 30.0
"""A pod that neither a scheduler nor a kubelet has reported for longer is named."""


def set_pods_ready(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """Set the condition; while workers are missing, its message has the reason."""
    desired = status.desired
    members = context.member_uids
    registered = sum(
        worker.alive and worker.agent is not None and worker.pod.phase is PodPhase.RUNNING
        for worker in context.workers.values()
        if not worker.finished
    ) + sum(worker.finished for uid, worker in context.workers.items() if uid in members)
    kind = ConditionType.PODS_READY
    if registered >= desired:
        message = f"{pluralize(desired, 'worker')} {'is' if desired == 1 else 'are'} registered"
        return set_condition(status, kind, True, Reason.ALL_READY, message, now=context.now)
    reason, explanation = _explain_missing_workers(context, status)
    message = (
        f"{registered} of {pluralize(desired, 'worker')} {'is' if desired == 1 else 'are'} registered. {explanation}"
    )
    return set_condition(status, kind, False, reason, message, now=context.now)


def _explain_missing_workers(context: PlanContext, status: TrainingJobStatus) -> tuple[Reason, str]:
    if conflicts := sorted(context.observed.name_conflicts.items()):
        return Reason.NAME_TAKEN, conflicts[0][1]
    if (refusal := describe_creation_refusal(context)) is not None:
        return refusal
    if (blocker := find_creation_blocker(context)) is not None:
        return blocker
    unschedulable = [worker.pod for worker in context.workers.values() if worker.pod.unschedulable_message]
    if unschedulable:
        pods = format_names(tuple(pod.name for pod in unschedulable))
        return (
            Reason.UNSCHEDULABLE,
            f"{pods} cannot be scheduled: {unschedulable[0].unschedulable_message}{_describe_capacity(context)}",
        )
    waiting = [
        worker.pod
        for worker in context.workers.values()
        if worker.pod.phase in (PodPhase.PENDING, PodPhase.FAILED) and worker.pod.reason
    ]
    blocked_pods = [pod for pod in waiting if pod.reason not in STARTING_REASONS]
    if blocked_pods:
        pod = blocked_pods[-1]
        return Reason.WORKER_NOT_STARTING, f"{pod.location}: {pod.reason} {pod.message}"
    if (unanswered := _explain_unanswered_pods(context)) is not None:
        return unanswered
    if (start_failures := describe_start_failures(status, context.now)) is not None:
        return Reason.WORKER_NOT_STARTING, start_failures
    return _explain_init_containers(context) or (Reason.WAITING_FOR_WORKERS, "")


def _explain_unanswered_pods(context: PlanContext) -> tuple[Reason, str] | None:
    """Return which pods no scheduler has looked at, or which kubelet has not reported a pod."""
    silent = [
        worker.pod
        for worker in context.workers.values()
        if _has_no_report(worker.pod) and context.now >= worker.pod.created + UNANSWERED_SECONDS
    ]
    if not silent:
        return None
    pod = silent[0]
    names_text = format_names(tuple(silent_pod.name for silent_pod in silent if silent_pod.scheduled == pod.scheduled))
    if not pod.scheduled:
        return Reason.UNSCHEDULABLE, (
            f"no scheduler has looked at {names_text} for {UNANSWERED_SECONDS:.0f} s or more: does the scheduler "
            f"{pod.scheduler or 'default-scheduler'} (schedulerName of the pod) run in this cluster?"
        )
    return Reason.WORKER_NOT_STARTING, f"the kubelet of node {pod.node} has not reported {names_text}: does it run?"


def _has_no_report(pod: PodView) -> bool:
    waits = pod.phase is PodPhase.PENDING and not pod.deleting
    return waits and not (pod.reason or pod.unschedulable_message or pod.init_container)


def _explain_init_containers(context: PlanContext) -> tuple[Reason, str] | None:
    """Return which init container runs; after `SLOW_INIT_SECONDS` it is a problem, except the operator's."""
    pending_pods = [
        worker.pod
        for worker in context.workers.values()
        if worker.pod.init_container and worker.pod.phase is PodPhase.PENDING
    ]
    if not pending_pods:
        return None
    pod = min(pending_pods, key=lambda pod: (pod.init_since or context.now, pod.ordinal))
    seconds = context.now - (pod.init_since or context.now)
    text = f"{pod.location}: init container {pod.init_container} is running"
    if pod.init_container == PRECOMPILE_CONTAINER or seconds < SLOW_INIT_SECONDS:
        return Reason.WAITING_FOR_WORKERS, text
    return Reason.WORKER_NOT_STARTING, (
        f"{text} for more than {SLOW_INIT_SECONDS // 60:.0f} minutes, and the worker waits for it: "
        f"kubectl logs {pod.name} -c {pod.init_container} -n {context.job.namespace}"
    )


def _describe_capacity(context: PlanContext) -> str:
    return "".join(feature.describe_capacity(context) for feature in context.features)


def find_slow_start_times(context: PlanContext) -> tuple[float, ...]:
    """Return when init containers will have run, or pods will have waited for a report, for too long."""
    pods = [worker.pod for worker in context.workers.values()]
    deadlines = [pod.init_since + SLOW_INIT_SECONDS for pod in pods if pod.init_since is not None]
    deadlines += [pod.created + UNANSWERED_SECONDS for pod in pods if _has_no_report(pod)]
    return tuple(at for at in deadlines if at > context.now)
