"""Keep the desired, reserve and spare worker pods and extras, and the configuration that they mount.

How creation survives a crash: the status raises `nextPodOrdinal` first, then the pods below it are created. Ordinals
whose creation was interrupted are skipped and never reused; a pod whose creation was not noticed is at worst one too
many, and is deleted.

Guarantees:
- The ConfigMap with the trainer's configuration exists before the pods that mount it, and is never stale; parts that
  a newer version wrote are left as they are.
- Members are never surplus.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import get_budget, suspects_node
from trainium_contract.faults.responses import Response
from trainium_contract.status.internal import FailureRecord
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.diagnose.failure_policy import MAX_START_FAILURES, find_start_failures
from trainium_operator.plan.diagnose.node_failures import find_members_to_move
from trainium_operator.plan.diagnose.pod_failures import (
    classify_ended_pod,
    find_eviction_cause,
    has_failed_by_itself,
)
from trainium_operator.plan.diagnose.process_failures import classify_process_failure
from trainium_operator.plan.faults import failure_budgets
from trainium_operator.plan.manifests.affinity import AvoidedNodes, add_affinity, assign_unit
from trainium_operator.plan.manifests.config_maps import build_config_map
from trainium_operator.plan.manifests.worker_pod import (
    build_worker_pods,
    compute_template_hash,
    is_outdated,
)
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyObject, CreatePod, PolicyResult, build_event
from trainium_operator.plan.model.observed import PodPhase, PodView
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.pods.node_avoidance import find_broken_units, list_forbidden_nodes, list_released_nodes
from trainium_operator.plan.pods.refused_pods import (
    add_refusing_nodes,
    find_next_creation,
    limit_batch,
    record_start_failures,
)
from trainium_operator.plan.view.context import PlanContext, find_creation_blocker, is_unfit, reconcile_object
from trainium_operator.plan.view.units import count_missing_pods, find_unit, select_surplus
from trainium_operator.plan.view.workers import Worker, build_deletion, delete_ended_last

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import InternalStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.diagnose.failed_member import FailedMember
    from trainium_operator.plan.model.actions import Action, DeletePod, Event

Json = dict[str, Any]

_DIGITS = re.compile(r"\d+")


def reconcile_configuration(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Apply the configuration if it is missing or stale."""
    if context.now < context.observed.create_after:
        return PolicyResult(status=status, requeue_at=(context.observed.create_after,))
    if context.size.shape is None:
        return PolicyResult(status=status)
    manifest = build_config_map(context.job, context.observed.ca_bundle)
    exists = f"{manifest['kind']}/{manifest['metadata']['name']}" in context.observed.children
    if exists and context.job.unknown:
        return PolicyResult(status=status)
    return reconcile_object(context, status, manifest, ApplyObject)


def reconcile_pods(
    context: PlanContext, status: TrainingJobStatus, failed_members: tuple[FailedMember, ...]
) -> PolicyResult:
    """Delete and create pods until they match the desired ones."""
    result = _reconcile_pods(context, status, failed_members)
    deleted = (*context.non_members, *(failed.worker for failed in failed_members if failed.worker is not None))
    return replace(result, actions=delete_ended_last(result.actions, deleted))


def _reconcile_pods(
    context: PlanContext, status: TrainingJobStatus, failed_members: tuple[FailedMember, ...]
) -> PolicyResult:
    failed_uids = {failed.member.pod_uid for failed in failed_members}
    deletions: list[DeletePod] = []
    for failed in failed_members:
        if failed.worker is not None and not failed.keeps_pod:
            deletions += build_deletion(failed.worker, force=failed.force_delete)
    broken = find_broken_units(context, status)
    non_members, result = _sort_non_members(context, status, broken)
    result = PolicyResult(status=status, actions=tuple(deletions)).combine(result)
    status = result.status.replaced(start_failures=record_start_failures(context, result.status))
    # Failures that this plan has counted: replacements must avoid their nodes.
    avoid = failure_budgets.list_avoided_nodes(status.failures, context.now)
    status = status.replaced(avoided_nodes=add_refusing_nodes(avoid, status, context.now))
    # Members that a smaller generation leaves out still count: they become its spares, or surplus once it trains.
    replaced = broken | {find_unit(worker.pod) for _, worker in find_members_to_move(context)}
    staying = [worker for member, worker in context.members if worker is not None and member.pod_uid not in failed_uids]
    wanted_extras = _count_extras_to_keep(context, status)
    requested = status.desired - status.idle_nodes.taken + _count_spares_to_keep(context)
    extras = sum(worker.pod.extra for worker in non_members) + sum(
        worker is not None and worker.pod.extra
        for member, worker in context.members
        if member.pod_uid not in failed_uids
    )
    # An extra beyond the wanted ones counts as a requested worker.
    counted = [find_unit(worker.pod) for worker in (*staying, *non_members)][min(extras, wanted_extras) :]
    counted = [unit for unit in counted if unit not in replaced]
    missing, completed = count_missing_pods(counted, requested, context.unit_nodes)
    missing_extras = max(0, wanted_extras - extras)
    if missing + missing_extras > 0:
        return result.combine(_create_pods(context, status, missing, missing_extras, completed))
    surplus = _delete_surplus(context, status, non_members, counted, requested)
    return result.combine(PolicyResult(status=status, actions=surplus))


def _is_superseded(context: PlanContext, status: PublicStatus) -> bool:
    """Return whether the current generation is about to be left."""
    return context.current is not None and status.membership.generation > context.current.generation


def _sort_non_members(
    context: PlanContext, status: TrainingJobStatus, broken: frozenset[str]
) -> tuple[list[Worker], PolicyResult]:
    """Return the workers beside the members; delete those that do not count, but not the evidence of a failed start."""
    evidence = _list_workers_kept_for_logs(context)
    usable: list[Worker] = []
    deletions: list[DeletePod] = []
    events: list[Event] = []
    current_hash = compute_template_hash(context.job, context.settings) if context.non_members else ""
    released = list_released_nodes(context)
    for worker in context.non_members:
        if worker in evidence:
            continue
        is_outdated_worker = not context.job.unknown and _is_outdated_pod(worker, current_hash)
        is_outdated_worker = is_outdated_worker or _is_unschedulable(worker, released)
        if (
            worker.alive
            and not is_outdated_worker
            and not any(feature.is_misplaced(context, status, worker) for feature in context.features)
        ):
            if not is_unfit(context, worker) and find_unit(worker.pod) not in broken:
                usable.append(worker)
            elif _has_left(context, status, worker):
                deletions += build_deletion(worker)
            continue
        failure = _detect_failure(context, status, worker)
        if failure is not None:
            if failure.node or not worker.pod.extra:  # a missing optional worker does not end a job
                status = status.replaced(failures=_count_failure(context, status, failure))
            events.append(
                build_event(
                    Reason.WORKER_FAILED, failure.note, warning=True, pod=worker.pod.name, series=failure.series
                )
            )
            if (
                failure_budgets.describe_exhausted_budget(status.failures, context.job.spec.recovery, context.now)
                is not None
            ):
                continue  # the next plan ends the job and names this pod, and its log states why
        deletions += build_deletion(worker, force=worker.node_bad and (worker.pod.deleting or worker.holds_node))
    return usable, PolicyResult(status=status, actions=tuple(deletions), events=tuple(events))


def _list_workers_kept_for_logs(context: PlanContext) -> tuple[Worker, ...]:
    """Return the newest workers that failed before any step.

    None of them holds a node that the next attempt needs.
    """
    failed = find_start_failures(context)[-MAX_START_FAILURES:]
    if any(worker.pod.unschedulable_message for worker in context.non_members):
        return tuple(worker for worker in failed if not worker.holds_node)
    return failed


def _has_left(context: PlanContext, status: PublicStatus, worker: Worker) -> bool:
    """Return whether a worker that is no member runs no process of a generation any more, or never did."""
    heartbeat = worker.heartbeat
    is_idle = heartbeat is None or heartbeat.phase is WorkerPhase.STANDBY
    return is_idle or context.current is None or (context.is_settled and not _is_superseded(context, status))


def _is_outdated_pod(worker: Worker, current_hash: str) -> bool:
    """Return whether it never ran and has an old template: a corrected image or selector must reach it."""
    pod = worker.pod
    return pod.phase is PodPhase.PENDING and worker.agent is None and is_outdated(pod.template_hash, current_hash)


def _is_unschedulable(worker: Worker, released: frozenset[str]) -> bool:
    """Return whether it finds no node, and avoids one that may be used again."""
    pod = worker.pod
    return pod.phase is PodPhase.PENDING and bool(pod.unschedulable_message) and bool(pod.avoided_nodes & released)


@dataclass(frozen=True, slots=True)
class _NonMemberFailure:
    """The failure of a worker that never became a member; it counts once, by the pod's name."""

    cause: Cause
    pod: str
    node: str
    """The node to avoid; empty if none is to blame."""
    note: str
    series: str = ""
    """Failures with the same series are one event with a count; numbers in a message (ordinals, times) are ignored."""


def _detect_failure(context: PlanContext, memory: InternalStatus, worker: Worker) -> _NonMemberFailure | None:
    failed = worker.pod.phase is PodPhase.FAILED
    if not (failed or worker.has_given_up) or failure_budgets.has_record(memory, worker.pod.name):
        return None
    if failed and _was_deleted(context, worker):
        return None
    return _find_ended_pod_failure(context, worker) if failed else _find_preflight_failure(context, worker)


def _was_deleted(context: PlanContext, worker: Worker) -> bool:
    """Return whether it ended because a user or a plan deleted it, not because of a broken device."""
    pod = worker.pod
    return pod.deleting and classify_ended_pod(pod, context.job.spec.recovery.rules).cause is not Cause.DEVICE


def _count_failure(
    context: PlanContext, memory: InternalStatus, failure: _NonMemberFailure
) -> tuple[FailureRecord, ...]:
    record = FailureRecord(at=context.now, cause=failure.cause, pod=failure.pod, node=failure.node)
    return failure_budgets.record_failure(memory.failures, record, context.job.spec.recovery)


def _find_ended_pod_failure(context: PlanContext, worker: Worker) -> _NonMemberFailure:
    pod = worker.pod
    cause = classify_ended_pod(pod, context.job.spec.recovery.rules).cause
    evicted_for = find_eviction_cause(pod)
    is_node_blamed = has_failed_by_itself(pod) if evicted_for is None else suspects_node(cause)
    blamed_node = pod.node if is_node_blamed else ""
    kind, message = _describe_end(pod, cause)
    return _NonMemberFailure(
        cause=cause if evicted_for is not None or get_budget(cause) is None else Cause.POD_LOST,
        pod=pod.name,
        node=blamed_node,
        note=f"Pod {pod.name} on node {pod.node} ended before it could join{kind}: {message}",
        series=f"{blamed_node}{kind} {pod.init_exit_code} {_DIGITS.sub('0', message)}",
    )


def _describe_end(pod: PodView, cause: Cause) -> tuple[str, str]:
    """Return the cause with its exit code, and the message; that of an init container has its code."""
    if pod.init_exit_code is not None:
        return "", pod.message
    code = "" if pod.exit_code is None else f", exit code {pod.exit_code}"
    return f" ({cause.value}{code})", pod.message or pod.reason


def _find_preflight_failure(context: PlanContext, worker: Worker) -> _NonMemberFailure | None:
    pod, heartbeat = worker.pod, worker.heartbeat
    if heartbeat is None or heartbeat.verdict is None:
        return None
    classification = classify_process_failure(heartbeat, heartbeat.verdict, context.job.spec.recovery.rules)
    is_node_blamed = suspects_node(classification.cause) and classification.response is not Response.REPLACE_WORKER
    return _NonMemberFailure(
        cause=classification.cause,
        pod=pod.name,
        node=pod.node if is_node_blamed else "",
        note=(
            f"Pod {pod.name} on node {pod.node} is unfit (exit code {heartbeat.verdict.exit_code}): "
            f"{heartbeat.verdict.message}"
        ),
    )


def _create_pods(
    context: PlanContext, status: TrainingJobStatus, missing: int, extras: int, completed: tuple[str, ...]
) -> PolicyResult:
    """Create this many requested workers, the first of which complete units, and this many beyond them."""
    if find_creation_blocker(context) is not None:
        return PolicyResult(status=status)
    resume_at = max(
        failure_budgets.find_backoff_end(status.failures, context.now), find_next_creation(status, context.now)
    )
    create_at = max(resume_at, context.observed.create_after)
    if context.now < create_at:
        return PolicyResult(status=status, requeue_at=(create_at,))
    missing, requeue_at = limit_batch(context, status, missing)
    if missing + extras == 0:
        return PolicyResult(status=status, requeue_at=requeue_at)
    highest = max((worker.pod.ordinal for worker in context.workers.values()), default=-1)
    next_ordinal = status.next_pod_ordinal
    first = max(next_ordinal if next_ordinal <= names.LAST_ORDINAL else 0, highest + 1)
    ordinals = range(first, first + missing + extras)
    status = status.replaced(next_pod_ordinal=ordinals.stop)
    avoided = AvoidedNodes(required=list_forbidden_nodes(context, status), preferred=status.avoided_nodes)
    manifests = build_worker_pods(context.job, context.settings, ordinals, avoided, extras=extras)
    manifests = [{**pod, "spec": add_affinity(pod["spec"], context.job, context.settings)} for pod in manifests]
    manifests = _assign_units(context, manifests, ordinals, completed)
    actions: tuple[Action, ...] = ()
    for feature in context.features:
        applied_actions, manifests = feature.place_pods(context, status, manifests)
        actions += applied_actions
    return PolicyResult(status=status, actions=(*actions, *map(CreatePod, manifests)))


def _assign_units(
    context: PlanContext, manifests: list[Json], ordinals: range, completed: tuple[str, ...]
) -> list[Json]:
    """Return the pods, each placed with the others of its unit, where a unit has several nodes."""
    if context.unit_nodes == 1:
        return manifests
    topology_key = context.job.spec.workers.accelerator.find_unit_label()
    firsts = ordinals[len(completed) :: context.unit_nodes]
    new_units = (names.format_unit_name(context.job.id, first) for first in firsts for _ in range(context.unit_nodes))
    return [
        assign_unit(pod, unit, topology_key)
        for pod, unit in zip(manifests, chain(completed, new_units), strict=False)  # the last unit may lack pods
    ]


def _count_spares_to_keep(context: PlanContext) -> int:
    wanted = context.size.reserve + context.job.spec.workers.spares
    return wanted if context.grant is None else min(wanted, context.grant.spares)


def _count_extras_to_keep(context: PlanContext, status: PublicStatus) -> int:
    wanted = status.idle_nodes.wanted
    return wanted if context.grant is None else max(0, min(wanted, context.grant.workers - context.size.desired))


def _delete_surplus(
    context: PlanContext, status: PublicStatus, non_members: list[Worker], counted: list[str], requested: int
) -> tuple[DeletePod, ...]:
    """Return the pods to delete of those that are counted, by unit, beyond the requested: those that never ran at once.

    Others only when the current generation trains, so that none is still saving.
    """
    is_steady = context.current is None or (context.is_settled and not _is_superseded(context, status))
    is_at_size = context.current is None or len(context.current.members) == status.desired

    def order(worker: Worker) -> tuple[bool, bool, bool, int]:
        return not worker.pod.extra, not worker.never_ran, worker.warm, -worker.pod.ordinal

    candidates = sorted(non_members, key=order)
    surplus = select_surplus(candidates, counted, requested, context.unit_nodes)
    deleted = (worker for worker in surplus if worker.never_ran or (is_steady and is_at_size))
    return tuple(action for worker in deleted for action in build_deletion(worker))
