"""Policy: decide what to request from Kueue, what to report to it, and what to release.

Invariants: quota is released (by returning it after an eviction, or by deleting the Workload) only when no pod that
uses it is left. A Workload that holds quota is never changed. Each write is one step from the observed to the wanted
state, so a crash between any two only delays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.features.kueue.admission import QueueGrant, base_workload, further_workloads
from trainium_operator.plan.features.kueue.workload import workload
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyWorkload, DeleteWorkload, PolicyResult, SetQuotaConditions
from trainium_operator.plan.model.conditions import is_true
from trainium_operator.plan.model.feature import AdmissionState
from trainium_operator.plan.model.quota import WORKERS, WorkloadCondition, WorkloadConditionView
from trainium_operator.plan.view.size import SizeDecision, needed_workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.actions import QuotaAction
    from trainium_operator.plan.model.quota import QuotaView, WorkloadView
    from trainium_operator.plan.view.facts import Facts

MOST_STEPS = 8
"""Most Workloads beside the first; if there are more useful sizes, a step combines several of them."""
_AT_ONCE = frozenset({"Preempted", "NodeFailures"})
"""Reasons of evictions after which a Workload is queued again at once; after others Kueue sets the time."""


def reconcile_quota(facts: Facts, status: TrainingJobStatus) -> PolicyResult:
    """Reconcile the job's Workloads, and report the state of its pods to Kueue."""
    quota, grant = facts.observed.quota, facts.grant
    if quota is None:
        return PolicyResult(status=status)
    if not isinstance(grant, QueueGrant):  # the job no longer names a queue
        return PolicyResult(status=status, actions=_delete_workloads(quota.workloads))
    if facts.job.spec.suspend or not facts.size.desired:
        return PolicyResult(
            status=status, actions=_delete_workloads(quota.workloads) if not _pods_with_quota(facts) else ()
        )
    base = base_workload(quota)
    if base is None or base.finished:
        if _pods_with_quota(facts):
            return PolicyResult(status=status)
        deletions = _delete_workloads(quota.workloads)
        return PolicyResult(
            status=status, actions=deletions or (_request_workload(facts, quota, 0, needed_workers(facts.size)),)
        )
    if grant.state is not AdmissionState.ADMITTED:
        return PolicyResult(status=status, actions=tuple(_request_first(facts, quota, base)))
    extras = status.idle_nodes.wanted
    return PolicyResult(
        status=status, actions=(*_request_steps(facts, quota, grant, extras), *_set_pods_ready(quota, status))
    )


def release_quota(facts: Facts, status: TrainingJobStatus) -> PolicyResult:
    """Notify Kueue that the job has ended, once none of its pods runs; delete Workloads that were never admitted."""
    quota = facts.observed.quota
    if quota is None or _pods_with_quota(facts):
        return PolicyResult(status=status)
    succeeded = is_true(status, ConditionType.COMPLETE)
    condition = WorkloadConditionView(
        WorkloadCondition.FINISHED,
        is_true=True,
        reason="Succeeded" if succeeded else "Failed",
        message=status.verdict or "the job has ended",
    )
    open_ = [each for each in quota.workloads if not each.finished and not each.deleting]
    ended = (
        _set_condition(each, condition) if each.part == 0 else DeleteWorkload(each.name, each.uid) for each in open_
    )
    return PolicyResult(status=status, actions=tuple(ended))


def _pods_with_quota(facts: Facts) -> int:
    """Return the pods that use quota, including those that are leaving."""
    return sum(worker.holds_node for worker in facts.workers.values())


def _delete_workloads(workloads: tuple[WorkloadView, ...]) -> tuple[DeleteWorkload, ...]:
    return tuple(DeleteWorkload(each.name, each.uid) for each in workloads if not each.deleting)


def _request_first(facts: Facts, quota: QuotaView, base: WorkloadView) -> Iterator[QuotaAction]:
    """Yield the next action while the first Workload is not admitted: pods leave, then quota is returned."""
    if _pods_with_quota(facts) or base.deleting:
        return
    yield from _delete_workloads(further_workloads(quota))
    if base.holds:
        if base.is_true(WorkloadCondition.EVICTED) or not base.active:
            yield return_quota(base)
        return
    if base.active:
        asked = _request_workload(facts, quota, 0, needed_workers(facts.size))
        if _is_outdated(base, asked):
            yield asked


def _request_steps(facts: Facts, quota: QuotaView, grant: QueueGrant, extras: int) -> Iterator[QuotaAction]:
    held = [each for each in further_workloads(quota) if each.holds]
    loose = [each for each in further_workloads(quota) if not each.holds and not each.deleting]
    base = base_workload(quota)
    assert base is not None
    covered = base.asked.get(WORKERS, 0) + sum(each.asked.get(WORKERS, 0) for each in held)
    pods_fit = _pods_with_quota(facts) <= grant.workers + grant.spares
    for each in held:
        if pods_fit and not each.deleting and (each.is_true(WorkloadCondition.EVICTED) or not each.active):
            yield return_quota(each)
    selector = grant.placement(WORKERS).node_selector
    wanted = remaining_steps(facts.size, covered, MOST_STEPS - len(held), extras=extras)
    used = {each.part for each in quota.workloads}
    free = iter(part for part in range(1, 2 * MOST_STEPS + 2) if part not in used)
    for number, workers in enumerate(wanted):
        asked = _request_workload(
            facts, quota, loose[number].part if number < len(loose) else next(free), workers, selector
        )
        if number >= len(loose) or (loose[number].active and _is_outdated(loose[number], asked)):
            yield asked
    for each in loose[len(wanted) :]:
        yield DeleteWorkload(each.name, each.uid)
    yield from _release_unused(facts, held, covered - facts.size.desired - extras, grant)


def _release_unused(facts: Facts, held: list[WorkloadView], unneeded: int, grant: QueueGrant) -> Iterator[QuotaAction]:
    """Release the last step among `unneeded` workers that a smaller job does not use, once its pods are deleted."""
    for each in reversed(held):
        workers = each.asked.get(WORKERS, 0)
        unused = grant.workers + grant.spares - (workers if each.admitted else 0)
        if unneeded >= workers and _pods_with_quota(facts) <= unused and not each.deleting:
            yield DeleteWorkload(each.name, each.uid)
            return


def _set_pods_ready(quota: QuotaView, status: PublicStatus) -> Iterator[QuotaAction]:
    """Yield the condition PodsReady, which Kueue may wait for; from then on this operator recovers the job."""
    if status.membership.size == 0:
        return
    condition = WorkloadConditionView(
        WorkloadCondition.PODS_READY, is_true=True, reason="Started", message="the job trains"
    )
    for each in quota.workloads:
        if each.admitted and not each.is_true(WorkloadCondition.PODS_READY):
            yield _set_condition(each, condition)


def _request_workload(
    facts: Facts, quota: QuotaView, part: int, workers: int, node_selector: Mapping[str, str] | None = None
) -> ApplyWorkload:
    spares = facts.size.reserve + facts.job.spec.workers.spares if part == 0 else 0
    manifest = workload(
        facts.job,
        facts.settings,
        part=part,
        workers=workers,
        spares=spares,
        priority=quota.priority,
        node_selector=node_selector,
    )
    return ApplyWorkload(manifest)


def _is_outdated(found: WorkloadView, asked: ApplyWorkload) -> bool:
    digest: str = asked.manifest["metadata"]["annotations"][names.ANNOTATION_CONTENT_HASH]
    return found.content_hash != digest


def return_quota(each: WorkloadView) -> SetQuotaConditions:
    """Return quota after an eviction as Kueue's own controllers do, so that Kueue queues the Workload again."""
    evicted = each.find(WorkloadCondition.EVICTED)
    reason = evicted.reason if evicted is not None and evicted.is_true else "Deactivated"
    message = evicted.message if evicted is not None and evicted.is_true else "the Workload is not active"
    return SetQuotaConditions(
        name=each.name,
        uid=each.uid,
        version=each.version,
        conditions=(
            WorkloadConditionView(WorkloadCondition.QUOTA_RESERVED, is_true=False, reason="Pending", message=message),
            WorkloadConditionView(
                WorkloadCondition.ADMITTED, is_true=False, reason="NoReservation", message="the quota was returned"
            ),
            WorkloadConditionView(
                WorkloadCondition.REQUEUED, is_true=reason in _AT_ONCE, reason=reason, message=message
            ),
        ),
        returns_quota=True,
    )


def _set_condition(each: WorkloadView, condition: WorkloadConditionView) -> SetQuotaConditions:
    return SetQuotaConditions(name=each.name, uid=each.uid, version=each.version, conditions=(condition,))


def remaining_steps(size: SizeDecision, workers: int, most: int = MOST_STEPS, *, extras: int = 0) -> tuple[int, ...]:
    """Return the workers of each further step up to the desired size and `extras`; at most `most` steps."""
    largest = size.desired + extras
    if size.shape is None or workers >= largest or most < 1:
        return ()
    elastic = size.floor < size.desired or workers >= size.desired
    between = size.shape.useful_sizes(workers + 1, largest) if elastic else (size.desired,)
    ends = [each for each in between if each < largest]
    ends.append(largest)
    # Evenly thinned out; the last one stays, because it is the requested size.
    count = min(most, len(ends))
    ends = [ends[(number + 1) * len(ends) // count - 1] for number in range(count)]
    return tuple(end - begin for begin, end in zip((workers, *ends), ends, strict=False))
