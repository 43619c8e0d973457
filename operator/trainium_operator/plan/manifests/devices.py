"""What worker pods ask of their nodes: extended resources, and the taints that they tolerate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.spec.workers import AcceleratorSpec, Device

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec

Json = dict[str, Any]

_UNREACHABLE_SECONDS = 30
"""How long a pod stays on a node that the control plane lost sight of; the plan acts earlier, this is the net below."""


def extended_resources(accelerator: AcceleratorSpec) -> dict[str, str]:
    """Devices that a worker asks for: all of its node, as the instance type has them, or what the spec says."""
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
    """Neuron devices that a worker must find, claimed or handed out; None where nothing says how many."""
    claim, instance = accelerator.claim, accelerator.instance()
    if claim is None:
        return extended_resources(accelerator).get("aws.amazon.com/neuron")
    count = instance.devices if claim.ultra_server_node and instance else accelerator.claimed_devices()
    return str(count) if count else None


def tolerations_of(spec: TrainingJobSpec) -> tuple[Json, ...]:
    """Tolerations of the worker pods, as far as the user's are readable."""
    pod = spec.workers.template.get("spec")
    theirs = pod.get("tolerations") if isinstance(pod, dict) else None
    given = theirs if isinstance(theirs, list) else []
    return (*device_tolerations(spec.workers.accelerator), *(each for each in given if isinstance(each, dict)))


def device_tolerations(accelerator: AcceleratorSpec) -> list[Json]:
    """Tolerations that the operator itself gives: of the device's taint, and for a while of a node that is lost."""
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
