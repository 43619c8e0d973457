"""Derive Kueue's grant to a job from all its Workloads: how many pods, and their placement by flavors.

A job that names a queue has no pods without an admission. The first Workload is what the job needs; while it is not
admitted nothing runs, whatever further ones hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_operator.plan.manifests.worker_pod import build_pod_template
from trainium_operator.plan.model.grant import AdmissionState, Grant
from trainium_operator.plan.model.names import LABEL_POD_SET
from trainium_operator.plan.model.observed import ApiState, Observed, PlanSettings
from trainium_operator.plan.model.quota import SPARES, WORKERS, Placement, QuotaView, WorkloadCondition, WorkloadView
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.actions import Action
    from trainium_operator.plan.view.context import PlanContext


Json = dict[str, Any]

ANNOTATION_WORKLOAD = "kueue.x-k8s.io/workload"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGrant(Grant):
    """A grant, and the placement of its pods."""

    placements: tuple[tuple[str, Placement], ...] = ()
    """By pod set."""
    workload: str = ""
    """Name of the first Workload."""

    def find_placement(self, pod_set: str) -> Placement:
        """Return the placement of pods of this pod set; that of the workers for a set that was not requested."""
        by_pod_set = dict(self.placements)
        return by_pod_set.get(pod_set) or by_pod_set.get(WORKERS) or Placement()


def admit(observed: Observed, settings: PlanSettings) -> QueueGrant | None:
    """Return the grant; None for a job without a queue."""
    queue = observed.job.spec.scheduling.queue_name
    if not queue:
        return None
    if observed.quota is None:
        absent = settings.kueue in (ApiState.OFF, ApiState.ABSENT)
        reason = Reason.GANG_API_MISSING if absent else Reason.WAITING_FOR_QUEUE
        return QueueGrant(
            state=AdmissionState.UNKNOWN, reason=reason, message=_describe_unavailability(queue, settings.kueue)
        )
    base = find_base_workload(observed.quota)
    if base is None:
        return QueueGrant(state=AdmissionState.WAITING, message=f"quota is requested in queue {queue}")
    if not base.admitted:
        return _build_waiting_grant(queue, base)
    return _build_admitted_grant(observed.quota, base, _read_template_placement(observed, settings, base))


def find_base_workload(quota: QuotaView) -> WorkloadView | None:
    """Return the Workload with the quota that the job needs."""
    return next((workload for workload in quota.workloads if workload.part == 0), None)


def list_further_workloads(quota: QuotaView) -> tuple[WorkloadView, ...]:
    """Return the Workloads with the additional quota that the job requests, by part."""
    return tuple(workload for workload in quota.workloads if workload.part > 0)


def _read_template_placement(observed: Observed, settings: PlanSettings, base: WorkloadView) -> Placement:
    """Return where the job's own template places its pods.

    Kueue applies it for flavors, but checks may contradict it.
    """
    if not base.updates:
        return Placement()
    return Placement(node_selector=build_pod_template(observed.job, settings)["spec"].get("nodeSelector") or {})


def _build_admitted_grant(quota: QuotaView, base: WorkloadView, template_placement: Placement) -> QueueGrant:
    placements: list[tuple[str, Placement]] = []
    counts: dict[str, int] = {}
    for pod_set_grant in base.grants:
        counts[pod_set_grant.name] = pod_set_grant.count
        missing = [name for name in pod_set_grant.flavors if name not in quota.flavors]
        if missing:
            return QueueGrant(
                state=AdmissionState.CONTRADICTION, message=f"ResourceFlavor {missing[0]} does not exist any more"
            )
        flavor_placements = [quota.flavors[name] for name in pod_set_grant.flavors]
        placement, problem = merge_placements(
            [
                template_placement,
                *flavor_placements,
                *([base.updates[pod_set_grant.name]] if pod_set_grant.name in base.updates else []),
            ]
        )
        if problem:
            message = f"{problem}: correct them, and delete Workload {base.name}"
            return QueueGrant(state=AdmissionState.CONTRADICTION, message=message)
        placements.append((pod_set_grant.name, placement))
    further_workers = sum(
        grant.count for step in list_further_workloads(quota) if step.admitted for grant in step.grants
    )
    return QueueGrant(
        state=AdmissionState.ADMITTED,
        workers=counts.get(WORKERS, 0) + further_workers,
        spares=counts.get(SPARES, 0),
        other_pods={name: count for name, count in counts.items() if name not in (WORKERS, SPARES)},
        placements=tuple(placements),
        workload=base.name,
    )


def _build_waiting_grant(queue: str, base: WorkloadView) -> QueueGrant:
    evicted = base.find(WorkloadCondition.EVICTED)
    pending = base.find(WorkloadCondition.QUOTA_RESERVED)
    pending_message = pending.message if pending is not None and not pending.is_true else ""
    if base.deleting or base.finished:
        state = "is being deleted" if base.deleting else "is finished, though the job is not"
        return QueueGrant(
            state=AdmissionState.WAITING, message=f"Workload {base.name} {state}; then quota is requested again"
        )
    if not base.active:
        message = f"Workload {base.name} is not active: set its spec.active to true to let the job go on"
        return QueueGrant(state=AdmissionState.EVICTED, reason=Reason.EVICTED, message=message)
    if evicted is not None and evicted.is_true:
        # Once it is queued again, why it waits matters more than why it was evicted.
        why = evicted.message if base.holds_quota or not pending_message else pending_message
        return QueueGrant(
            state=AdmissionState.EVICTED,
            reason=Reason.EVICTED,
            message=f"evicted from queue {queue} ({evicted.reason}): {why}",
        )
    if base.holds_quota:
        return QueueGrant(
            state=AdmissionState.WAITING, message=f"queue {queue} has quota for it; admission checks are not ready"
        )
    return QueueGrant(
        state=AdmissionState.WAITING, message=f"queue {queue}: {pending_message or 'Kueue has not processed it yet'}"
    )


def _describe_unavailability(queue: str, state: ApiState) -> str:
    prefix = f"queueName is {queue}, but"
    if state is ApiState.OFF:
        return f"{prefix} this operator does not work with Kueue: set the chart's kueue.enabled, or clear it"
    if state is ApiState.ABSENT:
        return f"{prefix} this cluster does not serve kueue.x-k8s.io/v1beta2: install Kueue, or clear it"
    return f"{prefix} Kueue's objects are not read yet, or cannot be: the operator's log says which"


def merge_placements(placements: Iterable[Placement]) -> tuple[Placement, str]:
    """Return all of them as one, and a sentence if two want different values for one key (else empty)."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    selector: dict[str, str] = {}
    tolerations: list[Mapping[str, Any]] = []
    problem = ""
    for placement in placements:
        for what, into, more in (
            ("label", labels, placement.labels),
            ("annotation", annotations, placement.annotations),
            ("node selector", selector, placement.node_selector),
        ):
            for key, value in more.items():
                if into.setdefault(key, value) != value and not problem:
                    problem = f"flavors, admission checks and the job want {what} {key} to be {into[key]} and {value}"
        tolerations += [toleration for toleration in placement.tolerations if toleration not in tolerations]
    merged = Placement(labels=labels, annotations=annotations, node_selector=selector, tolerations=tuple(tolerations))
    return merged, problem


def apply_placement(pod: Json, placement: Placement, *, pod_set: str, workload: str) -> Json:
    """Return the pod with this pod set's placement."""
    metadata, spec = pod["metadata"], pod["spec"]
    tolerations = list(spec.get("tolerations") or ())
    tolerations += [dict(toleration) for toleration in placement.tolerations if toleration not in tolerations]
    changed_fields: Json = {"tolerations": tolerations} if tolerations else {}
    if placement.node_selector:
        changed_fields["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **placement.node_selector}
    return {
        **pod,
        "metadata": {
            **metadata,
            "labels": {**placement.labels, **metadata.get("labels", {}), LABEL_POD_SET: pod_set},
            "annotations": {
                **placement.annotations,
                **metadata.get("annotations", {}),
                ANNOTATION_WORKLOAD: workload,
            },
        },
        "spec": {**spec, **changed_fields},
    }


def place_pods(
    context: PlanContext, _status: PublicStatus, manifests: list[Json]
) -> tuple[tuple[Action, ...], list[Json]]:
    """Return the new pods, each with an admitted and free placement; those of workers are used first.

    A replacement that is created before its predecessor has left exceeds them for a moment, and takes the flavor of the
    workers.
    """
    grant = context.grant
    if not isinstance(grant, QueueGrant):
        return (), manifests
    pod_sets_in_use = [worker.pod.pod_set for worker in context.workers.values() if worker.alive]
    spares = max(0, grant.spares - pod_sets_in_use.count(SPARES))
    workers = max(0, grant.workers - (len(pod_sets_in_use) - pod_sets_in_use.count(SPARES)))
    pod_sets = [WORKERS if index < workers or index >= workers + spares else SPARES for index in range(len(manifests))]
    return (), [
        apply_placement(pod, grant.find_placement(name), pod_set=name, workload=grant.workload)
        for pod, name in zip(manifests, pod_sets, strict=True)
    ]


def place_pod_set(context: PlanContext, name: str, manifests: list[Json]) -> list[Json]:
    """Return the new pods of another pod set with its placement."""
    grant = context.grant
    if not isinstance(grant, QueueGrant):
        return manifests
    return [
        apply_placement(pod, grant.find_placement(name), pod_set=name, workload=grant.workload) for pod in manifests
    ]
