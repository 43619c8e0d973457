"""Derive what a worker needs from its node: devices, tolerations, memory and CPU.

Guarantee: requests of extended resources equal their limits. A template takes precedence for each resource. Only users
limit memory and CPU, because too low an estimate must not end a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.requirements.worker_requests import WorkerRequests, compute_worker_requests
from trainium_contract.spec.workers import AcceleratorSpec, Device

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec

Json = dict[str, Any]

WORKER_CONTAINER = "worker"
SHARED_MEMORY = "shared-memory"
_MIB = 1 << 20
_UNREACHABLE_SECONDS = 30
"""Longest stay of a pod on a node that the control plane cannot reach; the plan acts earlier."""


def extended_resources(accelerator: AcceleratorSpec) -> dict[str, str]:
    """Return the devices that a worker requests: all of its node by the instance type, or those in the spec."""
    if accelerator.resources:
        return dict(accelerator.resources)
    if accelerator.device is Device.CUDA:
        return {"nvidia.com/gpu": str(accelerator.cores())}
    instance = accelerator.instance()
    if accelerator.device is not Device.NEURON or instance is None:
        return {}
    found = {} if accelerator.claim is not None else {"aws.amazon.com/neuron": str(instance.devices)}
    return {**found, "vpc.amazonaws.com/efa": str(instance.efa)} if instance.efa else found


def expected_devices(accelerator: AcceleratorSpec) -> str | None:
    """Return the Neuron devices that a worker must find, claimed or allocated; None if the number is not known."""
    claim, instance = accelerator.claim, accelerator.instance()
    if claim is None:
        return extended_resources(accelerator).get("aws.amazon.com/neuron")
    count = instance.devices if claim.ultra_server_node and instance else accelerator.claimed_devices()
    return str(count) if count else None


def build_tolerations(spec: TrainingJobSpec) -> tuple[Json, ...]:
    """Return the tolerations of the worker pods, without unreadable ones of the user."""
    pod = spec.workers.template.get("spec")
    theirs = pod.get("tolerations") if isinstance(pod, dict) else None
    given = theirs if isinstance(theirs, list) else []
    return (*device_tolerations(spec.workers.accelerator), *(each for each in given if isinstance(each, dict)))


def device_tolerations(accelerator: AcceleratorSpec) -> list[Json]:
    """Return the operator's own tolerations: of the device's taint, and for a while of an unreachable node."""
    lost = [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _UNREACHABLE_SECONDS,
        }
        for taint in ("not-ready", "unreachable")
    ]
    device = {Device.NEURON: "aws.amazon.com/neuron", Device.CUDA: "nvidia.com/gpu"}.get(accelerator.device)
    return [{"key": device, "operator": "Exists"}, *lost] if device else lost


def with_worker_needs(spec: Json, job: TrainingJobSpec) -> Json:
    """Add the needs that follow from the job's configuration to the merged spec, where no template sets them."""
    found = needs_of_workers(job)
    if found is None:
        return spec
    wanted = {"memory": _mebibytes(found.memory), "cpu": _cpus(found.milli_cpu)}
    containers = spec.get("containers") or []
    if not spec.get("resources"):  # requests of the whole pod: a user who sets them means it
        containers = [_asking(each, wanted) if each.get("name") == WORKER_CONTAINER else each for each in containers]
    volumes = spec.get("volumes") or []
    if found.shared_memory is not None:
        limit = _mebibytes(found.shared_memory)
        volumes = [_limited(each, limit) if each.get("name") == SHARED_MEMORY else each for each in volumes]
    return {**spec, "containers": containers, "volumes": volumes}


def needs_of_workers(job: TrainingJobSpec) -> WorkerRequests | None:
    """Return the needs; None while the spec contradicts itself, which is reported elsewhere."""
    try:
        config = job.training_config() if job.program is None else None
        return compute_worker_requests(config, job.workers.accelerator, job.batch_shape())
    except ValueError:
        return None


def _asking(container: Json, wanted: Json) -> Json:
    resources = container.get("resources") or {}
    stated = {*(resources.get("requests") or {}), *(resources.get("limits") or {})}
    ours = {name: amount for name, amount in wanted.items() if name not in stated}
    if not ours:
        return container
    return {**container, "resources": {**resources, "requests": {**ours, **(resources.get("requests") or {})}}}


def _limited(volume: Json, limit: str) -> Json:
    empty = volume.get("emptyDir")
    if not isinstance(empty, dict) or empty.get("medium") != "Memory" or "sizeLimit" in empty:
        return volume
    return {**volume, "emptyDir": {**empty, "sizeLimit": limit}}


def _mebibytes(size: int) -> str:
    return f"{-(-size // _MIB)}Mi"


def _cpus(milli: int) -> str:
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"
