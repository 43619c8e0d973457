"""Build the ResourceClaimTemplate of a job that claims its devices, and the claims of its pods. Pure.

Invariants: a template's name follows from its content, because its spec cannot change. Devices are counted, never
`All`, so that quotas can count them too. A job without a claim has none of this. Shapes and names are those of
resource.k8s.io/v1 and of AWS's examples for the Neuron DRA driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.spec.claim import DRIVER, ClaimSpec
from trainium_operator.plan.manifests.owned_object import build_owned_object, compute_content_hash
from trainium_operator.plan.model import names
from trainium_operator.plan.model.names import CLAIM

if TYPE_CHECKING:
    from trainium_contract.spec.workers import AcceleratorSpec
    from trainium_operator.plan.model.observed import JobView

Json = dict[str, Any]

KIND = "ResourceClaimTemplate"
API_VERSION = "resource.k8s.io/v1"
_GROUP_ATTRIBUTE = "resource.aws.com/devicegroup{}_id"
"""Attribute shared by devices that are connected with each other, by the size of the group."""
_PARAMETERS_API_VERSION = "neuron.aws.com/v1"


def build_claim_template(job: JobView) -> Json | None:
    """Return the template for new pods; None for a job that claims nothing."""
    accelerator = job.spec.workers.accelerator
    if accelerator.claim is None:
        return None
    content = {"spec": {"spec": {"devices": _build_devices(accelerator, accelerator.claim)}}}
    name = names.format_claim_template_name(job.name, compute_content_hash(content))
    return build_owned_object(job, API_VERSION, KIND, name, content, "devices")


def build_pod_claim_fields(job: JobView) -> tuple[Json, Json]:
    """Return additional fields of a pod's spec and of its container's resources; empty without a claim."""
    template = build_claim_template(job)
    if template is None:
        return {}, {}
    reference = {"name": CLAIM, "resourceClaimTemplateName": template["metadata"]["name"]}
    return {"resourceClaims": [reference]}, {"claims": [{"name": CLAIM}]}


def _build_devices(accelerator: AcceleratorSpec, claim: ClaimSpec) -> Json:
    count = accelerator.count_claimed_devices()
    exactly: Json = {"deviceClassName": claim.device_class_name, "allocationMode": "ExactCount", "count": count}
    if claim.selectors:
        exactly["selectors"] = [{"cel": {"expression": selector}} for selector in claim.selectors]
    devices: Json = {"requests": [{"name": CLAIM, "exactly": exactly}]}
    if claim.connected:
        devices["constraints"] = [{"requests": [CLAIM], "matchAttribute": _GROUP_ATTRIBUTE.format(count)}]
    if claim.logical_neuron_core is not None:
        parameters: Json = {"kind": "NeuronConfig", "logicalNeuronCore": claim.logical_neuron_core}
        opaque = {"driver": DRIVER, "parameters": {"apiVersion": _PARAMETERS_API_VERSION, **parameters}}
        devices["config"] = [{"requests": [CLAIM], "opaque": opaque}]
    return devices
