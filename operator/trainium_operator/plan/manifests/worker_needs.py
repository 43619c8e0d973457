"""Derive what a worker needs from its node: devices, tolerations, memory and CPU.

Guarantee: requests of extended resources equal their limits. A template takes precedence for each resource. Only users
limit memory and CPU, because too low an estimate must not end a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.accelerators import DEVICES, EFA
from trainium_contract.requirements.worker_requests import WorkerRequests, compute_worker_requests

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.spec.workers import AcceleratorSpec

Json = dict[str, Any]

WORKER_CONTAINER = "worker"
SHARED_MEMORY = "shared-memory"
_MIB = 1 << 20
_UNREACHABLE_SECONDS = 30
"""Longest stay of a pod on a node that the control plane cannot reach; the plan acts earlier."""


def find_extended_resources(accelerator: AcceleratorSpec) -> dict[str, str]:
    """Return the devices that a worker requests: all of its node by the instance type, or those in the spec."""
    if accelerator.resources:
        return dict(accelerator.resources)
    device, instance = DEVICES[accelerator.device], accelerator.instance()
    if device.one_per_process:
        return {device.resource: str(accelerator.cores())}
    if not device.resource or instance is None:
        return {}
    devices = {} if accelerator.claim is not None else {device.resource: str(instance.devices)}
    return {**devices, EFA: str(instance.efa)} if instance.efa else devices


def find_expected_devices(accelerator: AcceleratorSpec) -> str | None:
    """Return the number of devices that a worker must find, claimed or allocated; None if it is not known."""
    device = DEVICES[accelerator.device]
    if not device.is_counted:
        return None
    if accelerator.claim is None:
        return find_extended_resources(accelerator).get(device.resource)
    count = accelerator.count_claimed_devices()
    return str(count) if count else None


def build_tolerations(spec: TrainingJobSpec) -> tuple[Json, ...]:
    """Return the tolerations of the worker pods, without unreadable ones of the user."""
    pod = spec.workers.template.get("spec")
    tolerations = pod.get("tolerations") if isinstance(pod, dict) else None
    listed = tolerations if isinstance(tolerations, list) else []
    return (
        *build_device_tolerations(spec.workers.accelerator),
        *(toleration for toleration in listed if isinstance(toleration, dict)),
    )


def build_device_tolerations(accelerator: AcceleratorSpec) -> list[Json]:
    """Return the operator's own tolerations: of the device's taint, and for a while of an unreachable node."""
    lost = [
        {
            "key": f"node.kubernetes.io/{condition}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _UNREACHABLE_SECONDS,
        }
        for condition in ("not-ready", "unreachable")
    ]
    taint = DEVICES[accelerator.device].taint
    return [{"key": taint, "operator": "Exists"}, *lost] if taint else lost


def add_worker_needs(spec: Json, job: TrainingJobSpec) -> Json:
    """Add the needs that follow from the job's configuration to the merged spec, where no template sets them."""
    needs = compute_worker_needs(job)
    if needs is None:
        return spec
    requests = {"memory": _format_mebibytes(needs.memory), "cpu": _format_cpus(needs.milli_cpu)}
    containers = spec.get("containers") or []
    if not spec.get("resources"):  # requests of the whole pod: a user who sets them means it
        containers = [
            _add_requests(container, requests) if container.get("name") == WORKER_CONTAINER else container
            for container in containers
        ]
    volumes = spec.get("volumes") or []
    if needs.shared_memory is not None:
        limit = _format_mebibytes(needs.shared_memory)
        volumes = [
            _set_size_limit(volume, limit) if volume.get("name") == SHARED_MEMORY else volume for volume in volumes
        ]
    return {**spec, "containers": containers, "volumes": volumes}


def compute_worker_needs(job: TrainingJobSpec) -> WorkerRequests | None:
    """Return the needs; None while the spec contradicts itself, which is reported elsewhere."""
    try:
        return compute_worker_requests(job.workload.configure(), job.workers.accelerator, job.batch_shape())
    except ValueError:
        return None


def _add_requests(container: Json, requests: Json) -> Json:
    resources = container.get("resources") or {}
    set_by_template = {*(resources.get("requests") or {}), *(resources.get("limits") or {})}
    added = {name: amount for name, amount in requests.items() if name not in set_by_template}
    if not added:
        return container
    return {**container, "resources": {**resources, "requests": {**added, **(resources.get("requests") or {})}}}


def _set_size_limit(volume: Json, limit: str) -> Json:
    empty = volume.get("emptyDir")
    if not isinstance(empty, dict) or empty.get("medium") != "Memory" or "sizeLimit" in empty:
        return volume
    return {**volume, "emptyDir": {**empty, "sizeLimit": limit}}


def _format_mebibytes(size: int) -> str:
    return f"{-(-size // _MIB)}Mi"


def _format_cpus(milli: int) -> str:
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"
