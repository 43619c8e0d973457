"""Policy: create the claim template of a job before its pods, and delete it when no pod refers to it.

A template cannot change, so another shape is another template, and a pod keeps the one that it was created for. Where
devices cannot be claimed no pod is created, and running pods continue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.classify import find_cause
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.faults.signs import SignKind
from trainium_operator.plan.faults.node_signals import NodeProblem
from trainium_operator.plan.features.dra.template import build_claim_template, build_pod_claim_fields
from trainium_operator.plan.model.actions import ApplyObject, DeleteTemplate, PolicyResult
from trainium_operator.plan.model.observed import ApiState, Observed, PlanSettings
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.context import Feature, PlanContext

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model.devices import DeviceTaint
    from trainium_operator.plan.view.workers import Worker

_SEVERITY = {"NoExecute": Severity.DRAIN, "NoSchedule": Severity.SUSPECT}
"""Severity of a taint by its effect: its holder is about to be evicted, or would not be placed there again."""
_UNAVAILABLE_MESSAGES = {
    ApiState.OFF: "devices are not claimed here: install the chart with dra.enabled=true, or leave out "
    "workers.accelerator.claim and install the Neuron device plugin",
    ApiState.ABSENT: "this cluster does not serve resource.k8s.io/v1, which comes with Kubernetes 1.34: leave out "
    "workers.accelerator.claim and install the Neuron device plugin",
    ApiState.READING: "claimed devices are being read",
}


def reconcile_templates(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Create the current template, and delete earlier ones that no pod refers to.

    If the spec has parts that this version does not know none is deleted, because a newer version may want another one.
    """
    if context.observed.devices is None:
        return PolicyResult(status=status)
    if context.now < context.observed.create_after:
        return PolicyResult(status=status, requeue_at=(context.observed.create_after,))
    present, wanted = context.observed.devices.templates, build_claim_template(context.job)
    name = wanted["metadata"]["name"] if wanted is not None else ""
    creations = () if wanted is None or name in present else (ApplyObject(wanted),)
    if context.job.unknown:
        return PolicyResult(status=status, actions=creations)
    used = {worker.pod.claim_template for worker in context.workers.values()}
    deletions = (DeleteTemplate(other, uid) for other, uid in sorted(present.items()) if other not in used | {name})
    return PolicyResult(status=status, actions=(*creations, *deletions))


def find_claim_blocker(context: PlanContext) -> tuple[Reason, str] | None:
    """Return why no pod can be created now, and what to do; None where devices can be claimed, or need not be."""
    state = context.settings.dra
    if context.job.spec.workers.accelerator.claim is None or state is ApiState.READY:
        return None
    reading = state is ApiState.READING
    return Reason.WAITING_FOR_DEVICES if reading else Reason.DEVICE_API_MISSING, _UNAVAILABLE_MESSAGES[state]


def describe_free_devices(context: PlanContext) -> str:
    """Return the number of nodes with enough free devices as a sentence; empty without a claim."""
    devices, count = context.observed.devices, context.job.spec.workers.accelerator.count_claimed_devices()
    if devices is None or not count:
        return ""
    return f" Nodes that have {count} free devices: {len(devices.free_nodes)} of {devices.nodes}."


def find_device_problems(observed: Observed, worker: Worker) -> Iterator[NodeProblem]:
    """Return the reported problems of the devices that the worker claims.

    A taint does not concern the other devices of its node, which the scheduler may give to a new worker. A device
    that is unhealthy and not tainted would be allocated again, so its node is avoided.
    """
    taints = observed.devices.taints.get(worker.pod.uid, ()) if observed.devices is not None else ()
    yield from filter(None, (*map(find_taint_problem, taints), find_health_problem(worker.pod.device_health)))


def find_taint_problem(taint: DeviceTaint) -> NodeProblem | None:
    """Return the problem of a taint of a claimed device; None if it requires nothing of its holder."""
    cause = find_cause(SignKind.DEVICE_TAINT, taint.effect)
    if cause is None:
        return None
    key = f"{taint.key}={taint.value}" if taint.value else taint.key
    source, reason = f"device taint {key}", f"{taint.effect}, device {taint.device}"
    return NodeProblem(_SEVERITY.get(taint.effect, Severity.SUSPECT), cause, source, reason, taint.since)


def find_health_problem(reported: tuple[str, str] | None) -> NodeProblem | None:
    """Return the problem that the kubelet reports of a claimed device; None for a healthy one."""
    if reported is None:
        return None
    health, message = reported
    cause = find_cause(SignKind.CLAIM_HEALTH, health)
    return None if cause is None else NodeProblem(Severity.DRAIN, cause, "claim health", f"{health}, {message}")


def _is_used(observed: Observed, _settings: PlanSettings) -> bool:
    claimed = observed.job.spec.workers.accelerator.claim is not None
    return claimed or observed.devices is not None or any(pod.device_health for pod in observed.pods)


FEATURE = Feature(
    name="claimed devices",
    is_used=_is_used,
    pod_fields=build_pod_claim_fields,
    node_problems=find_device_problems,
    reconcile_before_pods=reconcile_templates,
    find_creation_blocker=find_claim_blocker,
    describe_capacity=describe_free_devices,
)
