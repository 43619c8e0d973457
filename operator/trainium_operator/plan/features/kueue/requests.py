"""Policy: decide what to request from Kueue, what to report to it, and what to release.

Invariants: quota is released (by returning it after an eviction, or by deleting the Workload) only when no pod that
uses it is left. A Workload that holds quota is never changed. Each write is one step from the observed to the wanted
state, so a crash between any two only delays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.features.kueue import admission
from trainium_operator.plan.features.kueue.admission import QueueGrant, find_base_workload, list_further_workloads
from trainium_operator.plan.features.kueue.workload import build_workload
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyWorkload, DeleteWorkload, PolicyResult, SetQuotaConditions
from trainium_operator.plan.model.conditions import is_true
from trainium_operator.plan.model.grant import AdmissionState
from trainium_operator.plan.model.quota import WORKERS, WorkloadCondition, WorkloadConditionView
from trainium_operator.plan.view.context import Feature, PlanContext, count_other_pods
from trainium_operator.plan.view.size import SizeDecision, count_needed_workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.actions import QuotaAction
    from trainium_operator.plan.model.observed import Observed, PlanSettings
    from trainium_operator.plan.model.quota import QuotaView, WorkloadView

MAX_QUOTA_STEPS = 8
"""Maximum number of Workloads beside the first; if there are more useful sizes, a step combines several of them."""
_IMMEDIATE_REQUEUE_REASONS = frozenset({"Preempted", "NodeFailures"})
"""Reasons of evictions after which a Workload is queued again at once; after others Kueue sets the time."""


def reconcile_quota(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Reconcile the job's Workloads, and report the state of its pods to Kueue."""
    quota, grant = context.observed.quota, context.grant
    if quota is None:
        return PolicyResult(status=status)
    if not isinstance(grant, QueueGrant):  # the job no longer names a queue
        return PolicyResult(status=status, actions=_delete_workloads(quota.workloads))
    if context.job.spec.suspend or not context.size.desired:
        return PolicyResult(
            status=status, actions=_delete_workloads(quota.workloads) if not _count_pods_with_quota(context) else ()
        )
    base_workload = find_base_workload(quota)
    if base_workload is None or base_workload.finished:
        if _count_pods_with_quota(context):
            return PolicyResult(status=status)
        deletions = _delete_workloads(quota.workloads)
        return PolicyResult(
            status=status,
            actions=deletions or (_request_workload(context, quota, 0, count_needed_workers(context.size)),),
        )
    if grant.state is not AdmissionState.ADMITTED:
        return PolicyResult(status=status, actions=tuple(_plan_first_workload(context, quota, base_workload)))
    extras = status.idle_nodes.wanted
    return PolicyResult(
        status=status,
        actions=(*_plan_further_workloads(context, quota, grant, extras), *_plan_pods_ready(quota, status)),
    )


def release_quota(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Notify Kueue that the job has ended, once none of its pods runs; delete Workloads that were never admitted."""
    quota = context.observed.quota
    if quota is None or _count_pods_with_quota(context):
        return PolicyResult(status=status)
    has_succeeded = is_true(status, ConditionType.COMPLETE)
    condition = WorkloadConditionView(
        WorkloadCondition.FINISHED,
        is_true=True,
        reason="Succeeded" if has_succeeded else "Failed",
        message=status.verdict or "the job has ended",
    )
    unfinished = [workload for workload in quota.workloads if not workload.finished and not workload.deleting]
    ended = (
        _build_condition_write(workload, condition)
        if workload.part == 0
        else DeleteWorkload(workload.name, workload.uid)
        for workload in unfinished
    )
    return PolicyResult(status=status, actions=tuple(ended))


def _count_pods_with_quota(context: PlanContext) -> int:
    """Return the pods that use quota, including those that are leaving."""
    return _count_workers_with_quota(context) + count_other_pods(context)


def _count_workers_with_quota(context: PlanContext) -> int:
    return sum(worker.holds_node for worker in context.workers.values())


def _delete_workloads(workloads: tuple[WorkloadView, ...]) -> tuple[DeleteWorkload, ...]:
    return tuple(DeleteWorkload(workload.name, workload.uid) for workload in workloads if not workload.deleting)


def _plan_first_workload(context: PlanContext, quota: QuotaView, base: WorkloadView) -> Iterator[QuotaAction]:
    """Yield the next action while the first Workload is not admitted: pods leave, then quota is returned."""
    if _count_pods_with_quota(context) or base.deleting:
        return
    yield from _delete_workloads(list_further_workloads(quota))
    if base.holds_quota:
        if base.is_true(WorkloadCondition.EVICTED) or not base.active:
            yield build_quota_return(base)
        return
    if base.active:
        request = _request_workload(context, quota, 0, count_needed_workers(context.size))
        if _is_outdated(base, request):
            yield request


def _plan_further_workloads(
    context: PlanContext, quota: QuotaView, grant: QueueGrant, extras: int
) -> Iterator[QuotaAction]:
    holding = [workload for workload in list_further_workloads(quota) if workload.holds_quota]
    unreserved = [
        workload for workload in list_further_workloads(quota) if not workload.holds_quota and not workload.deleting
    ]
    base = find_base_workload(quota)
    assert base is not None
    covered_workers = base.requested_pods.get(WORKERS, 0) + sum(
        workload.requested_pods.get(WORKERS, 0) for workload in holding
    )
    pods_fit = _count_workers_with_quota(context) <= grant.workers + grant.spares
    for workload in holding:
        if pods_fit and not workload.deleting and (workload.is_true(WorkloadCondition.EVICTED) or not workload.active):
            yield build_quota_return(workload)
    selector = grant.find_placement(WORKERS).node_selector
    step_sizes = list_remaining_steps(context.size, covered_workers, MAX_QUOTA_STEPS - len(holding), extras=extras)
    used = {workload.part for workload in quota.workloads}
    free = iter(part for part in range(1, 2 * MAX_QUOTA_STEPS + 2) if part not in used)
    for index, workers in enumerate(step_sizes):
        request = _request_workload(
            context, quota, unreserved[index].part if index < len(unreserved) else next(free), workers, selector
        )
        if index >= len(unreserved) or (unreserved[index].active and _is_outdated(unreserved[index], request)):
            yield request
    for workload in unreserved[len(step_sizes) :]:
        yield DeleteWorkload(workload.name, workload.uid)
    yield from _plan_release(context, holding, covered_workers - context.size.desired - extras, grant)


def _plan_release(
    context: PlanContext, holding: list[WorkloadView], unneeded_workers: int, grant: QueueGrant
) -> Iterator[QuotaAction]:
    """Release the last step among `unneeded_workers` that a smaller job does not use, once its pods are deleted."""
    for workload in reversed(holding):
        workers = workload.requested_pods.get(WORKERS, 0)
        remaining_quota = grant.workers + grant.spares - (workers if workload.admitted else 0)
        pods_fit = _count_workers_with_quota(context) <= remaining_quota
        if unneeded_workers >= workers and pods_fit and not workload.deleting:
            yield DeleteWorkload(workload.name, workload.uid)
            return


def _plan_pods_ready(quota: QuotaView, status: PublicStatus) -> Iterator[QuotaAction]:
    """Yield the condition PodsReady, which Kueue may wait for; from then on this operator recovers the job."""
    if status.membership.size == 0:
        return
    condition = WorkloadConditionView(
        WorkloadCondition.PODS_READY, is_true=True, reason="Started", message="the job trains"
    )
    for workload in quota.workloads:
        if workload.admitted and not workload.is_true(WorkloadCondition.PODS_READY):
            yield _build_condition_write(workload, condition)


def _request_workload(
    context: PlanContext, quota: QuotaView, part: int, workers: int, node_selector: Mapping[str, str] | None = None
) -> ApplyWorkload:
    spares = context.size.reserve + context.job.spec.workers.spares if part == 0 else 0
    manifest = build_workload(
        context.job,
        context.settings,
        part=part,
        workers=workers,
        spares=spares,
        priority=quota.priority,
        node_selector=node_selector,
        pod_sets=()
        if part
        else tuple(pod_set for feature in context.features for pod_set in feature.list_pod_sets(context)),
    )
    return ApplyWorkload(manifest)


def _is_outdated(existing: WorkloadView, request: ApplyWorkload) -> bool:
    digest: str = request.manifest["metadata"]["annotations"][names.ANNOTATION_CONTENT_HASH]
    return existing.content_hash != digest


def build_quota_return(workload: WorkloadView) -> SetQuotaConditions:
    """Return quota after an eviction as Kueue's own controllers do, so that Kueue queues the Workload again."""
    evicted = workload.find(WorkloadCondition.EVICTED)
    reason = evicted.reason if evicted is not None and evicted.is_true else "Deactivated"
    message = evicted.message if evicted is not None and evicted.is_true else "the Workload is not active"
    return SetQuotaConditions(
        name=workload.name,
        uid=workload.uid,
        version=workload.version,
        conditions=(
            WorkloadConditionView(WorkloadCondition.QUOTA_RESERVED, is_true=False, reason="Pending", message=message),
            WorkloadConditionView(
                WorkloadCondition.ADMITTED, is_true=False, reason="NoReservation", message="the quota was returned"
            ),
            WorkloadConditionView(
                WorkloadCondition.REQUEUED, is_true=reason in _IMMEDIATE_REQUEUE_REASONS, reason=reason, message=message
            ),
        ),
        returns_quota=True,
    )


def _build_condition_write(workload: WorkloadView, condition: WorkloadConditionView) -> SetQuotaConditions:
    return SetQuotaConditions(name=workload.name, uid=workload.uid, version=workload.version, conditions=(condition,))


def list_remaining_steps(
    size: SizeDecision, workers: int, max_steps: int = MAX_QUOTA_STEPS, *, extras: int = 0
) -> tuple[int, ...]:
    """Return the workers of each further step up to the desired size and `extras`; at most `max_steps`."""
    largest = size.desired + extras
    if size.shape is None or workers >= largest or max_steps < 1:
        return ()
    elastic = size.floor < size.desired or workers >= size.desired
    between = size.shape.useful_sizes(workers + 1, largest) if elastic else (size.desired,)
    ends = [size_end for size_end in between if size_end < largest]
    ends.append(largest)
    # Evenly thinned out; the last one stays, because it is the requested size.
    count = min(max_steps, len(ends))
    ends = [ends[(index + 1) * len(ends) // count - 1] for index in range(count)]
    return tuple(end - begin for begin, end in zip((workers, *ends), ends, strict=False))


def _is_used(observed: Observed, _settings: PlanSettings) -> bool:
    has_workloads = observed.quota is not None and bool(observed.quota.workloads)
    return bool(observed.job.spec.scheduling.queue_name) or has_workloads


FEATURE = Feature(
    name="Kueue",
    is_used=_is_used,
    admit=admission.admit,
    place_pods=admission.place_pods,
    place_pod_set=admission.place_pod_set,
    reconcile=reconcile_quota,
    finish=release_quota,
)
