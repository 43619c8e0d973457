"""The ConfigMaps of a job: pure construction, and when to apply them.

Invariant: each object carries a digest of its own content, so it is applied once and again only when that changes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from typing import TYPE_CHECKING, Any

from trainium_contract.worker_env import CHECKPOINT_MOUNT, GROUP, KIND, RULES_NAME, VERSION
from trainium_operator.plan import names
from trainium_operator.plan.model import ApplyObject

if TYPE_CHECKING:
    from trainium_contract.messages import Membership
    from trainium_contract.trainer_neuron import NeuronConfig
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.model import JobView

Json = dict[str, Any]

_COMPILED = "compiled"
_LARGEST_PLAIN = 128 * 1024
"""Bytes of membership that a person can still read in a ConfigMap."""


def converge_children(facts: Facts, draft: Draft) -> None:
    """Apply the configuration where it is missing or stale."""
    if facts.now < facts.observed.creations_from:
        draft.deadlines.append(facts.observed.creations_from)
        return
    if facts.size.shape is None:
        return
    manifest = config_map(facts.job, facts.observed.ca_bundle)
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


def config_map(job: JobView, ca_bundle: str) -> Json:
    """The trainer's configuration (JSON, which is YAML too), the job's rules and the coordinator's authority."""
    data = {names.TRAINER_KEY: trainer_configuration(job), names.CA_KEY: ca_bundle}
    rules = job.spec.recovery.rules
    if rules:
        data[RULES_NAME] = json.dumps([rule.to_wire() for rule in rules], indent=2, sort_keys=True) + "\n"
    return owned_object(job, "v1", "ConfigMap", names.config_name(job.name), {"data": data}, "configuration")


def membership_map(job: JobView, membership: Membership) -> Json:
    """The durable record of a membership; never mounted into a pod. A large one is packed: a ConfigMap holds 1 MiB."""
    text = json.dumps(membership.to_wire(), sort_keys=True)
    content: Json = {"data": {names.MEMBERSHIP_KEY: text}}
    if len(text) > _LARGEST_PLAIN:
        packed = base64.b64encode(gzip.compress(text.encode(), compresslevel=4, mtime=0)).decode()
        content = {"binaryData": {names.MEMBERSHIP_PACKED_KEY: packed}}
    return owned_object(job, "v1", "ConfigMap", names.membership_name(job.name), content, "membership")


def trainer_configuration(job: JobView) -> str:
    """The text of trainer.yaml. Raises ValueError when the spec contradicts itself."""
    config = job.spec.training_config()
    path = checkpoint_path(job)
    # What is appended to (metrics) needs a folder: the mount, which is the pod's own then.
    records = {"records_path": CHECKPOINT_MOUNT} if job.spec.checkpoint.storage.s3 is not None else {}
    checkpoint = config.checkpoint.model_copy(update={"path": path, **records})
    wire = config.model_copy(update={"checkpoint": checkpoint, "neuron": _neuron(job)}).to_wire()
    return json.dumps(wire, indent=2, sort_keys=True) + "\n"


def _neuron(job: JobView) -> NeuronConfig:
    """The job's settings; what is compiled ahead is kept on the checkpoints' volume unless they say where."""
    neuron, storage = job.spec.trainer.neuron, job.spec.checkpoint.storage
    mounted = storage.kept and storage.s3 is None
    if not job.spec.precompile.enabled or not mounted or neuron.shared_cache_directory is not None:
        return neuron
    return neuron.model_copy(update={"shared_cache_directory": f"{CHECKPOINT_MOUNT}/{_COMPILED}"})


def checkpoint_path(job: JobView) -> str:
    """Where this job's checkpoints are: below the mount point or the bucket's prefix; the pod's own volume as it is.

    The trainer makes the folder itself, with its own user; a subPath mount would leave it to root.
    """
    storage = job.spec.checkpoint.storage
    if not storage.kept:
        return CHECKPOINT_MOUNT
    root = CHECKPOINT_MOUNT if storage.s3 is None else storage.s3.path
    return f"{root}/{storage.sub_path or f'{job.namespace}/{job.name}'}"


def content_hash(content: Any) -> str:
    """A short digest of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def owned_object(job: JobView, api_version: str, kind: str, name: str, content: Json, component: str) -> Json:
    """A complete manifest that carries the digest of its own content."""
    metadata = {
        "name": name,
        "namespace": job.namespace,
        "labels": names.object_labels(job.name, component),
        "ownerReferences": [owner_reference(job)],
    }
    manifest = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}
    return {
        **manifest,
        "metadata": {**metadata, "annotations": {names.ANNOTATION_CONTENT_HASH: content_hash(manifest)}},
    }
