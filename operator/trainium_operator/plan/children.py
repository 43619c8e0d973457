"""The Service and the ConfigMaps of a job: pure construction, and when to apply them.

Invariant: each object carries a digest of its own content, so it is applied once and again only when that changes.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from trainium_contract.worker_env import CHECKPOINT_MOUNT, GROUP, KIND, VERSION
from trainium_operator.plan import names
from trainium_operator.plan.model import ApplyObject

if TYPE_CHECKING:
    from trainium_contract.messages import Membership
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.model import JobView

Json = dict[str, Any]


def converge_children(facts: Facts, draft: Draft) -> None:
    """Apply the Service and the configuration where they are missing or stale."""
    manifests = [service(facts.job)]
    if facts.size.shape is not None:
        manifests.append(config_map(facts.job, facts.observed.ca_bundle))
    for manifest in manifests:
        metadata = manifest["metadata"]
        wanted = metadata["annotations"][names.ANNOTATION_CONTENT_HASH]
        if facts.observed.children.get(f"{manifest['kind']}/{metadata['name']}") != wanted:
            draft.actions.append(ApplyObject(manifest))


def owner_reference(job: JobView) -> Json:
    """The controller reference that lets the garbage collector delete an object with its job."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def service(job: JobView) -> Json:
    """The headless Service; workers have host names before they are ready, because they must find each other first."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector_labels(job.name),
    }
    return _object(job, "Service", names.service_name(job.name), {"spec": spec}, "network")


def config_map(job: JobView, ca_bundle: str) -> Json:
    """The trainer's configuration (JSON, which is YAML too) and the coordinator's certificate authority."""
    data = {names.TRAINER_KEY: trainer_configuration(job), names.CA_KEY: ca_bundle}
    return _object(job, "ConfigMap", names.config_name(job.name), {"data": data}, "configuration")


def membership_map(job: JobView, membership: Membership) -> Json:
    """The durable record of a membership; never mounted into a pod."""
    data = {names.MEMBERSHIP_KEY: json.dumps(membership.to_wire(), sort_keys=True)}
    return _object(job, "ConfigMap", names.membership_name(job.name), {"data": data}, "membership")


def trainer_configuration(job: JobView) -> str:
    """The text of trainer.yaml. Raises ValueError when the spec contradicts itself."""
    config = job.spec.training_config()
    checkpoint = config.checkpoint.model_copy(update={"path": checkpoint_path(job)})
    wire = config.model_copy(update={"checkpoint": checkpoint}).to_wire()
    return json.dumps(wire, indent=2, sort_keys=True) + "\n"


def checkpoint_path(job: JobView) -> str:
    """Where this job's checkpoints are: below the mount point, unless the volume is the pod's own.

    The trainer makes the folder itself, with its own user; a subPath mount would leave it to root.
    """
    storage = job.spec.checkpoint.storage
    if storage.host_path is None and storage.persistent_volume_claim is None:
        return CHECKPOINT_MOUNT
    return f"{CHECKPOINT_MOUNT}/{storage.sub_path or f'{job.namespace}/{job.name}'}"


def content_hash(content: Any) -> str:
    """A short digest of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _object(job: JobView, kind: str, name: str, content: Json, component: str) -> Json:
    metadata = {
        "name": name,
        "namespace": job.namespace,
        "labels": names.object_labels(job.name, component),
        "ownerReferences": [owner_reference(job)],
    }
    manifest = {"apiVersion": "v1", "kind": kind, "metadata": metadata, **content}
    return {
        **manifest,
        "metadata": {**metadata, "annotations": {names.ANNOTATION_CONTENT_HASH: content_hash(manifest)}},
    }
