"""Build the ConfigMaps of a job: the trainer's configuration, and the record of the membership. Pure."""

from __future__ import annotations

import base64
import gzip
import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trainium_contract.base import IdentityKey
from trainium_contract.wire.recorded_membership import MEMBERSHIP_KEY
from trainium_contract.wire.worker_env import CHECKPOINT_MOUNT, COMPILED_FOLDER, NODES_NAME, RULES_NAME
from trainium_operator.plan.manifests.owned_object import build_owned_object
from trainium_operator.plan.model import names

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.trainer.neuron import NeuronConfig
    from trainium_contract.wire.messages import Membership
    from trainium_operator.plan.model.observed import JobView

Json = dict[str, Any]


def build_config_map(job: JobView, ca_bundle: str) -> Json:
    """Build the ConfigMap of the trainer's configuration (JSON), the job's rules, its size and the CA bundle."""
    workers = job.spec.workers
    nodes = f"{max(workers.replicas, workers.max_replicas or 0)}\n"
    data = {names.CA_KEY: ca_bundle, NODES_NAME: nodes}
    if configuration := render_trainer_configuration(job):
        data[names.TRAINER_KEY] = configuration
    rules = job.spec.recovery.rules
    if rules:
        data[RULES_NAME] = json.dumps([rule.to_wire() for rule in rules], indent=2, sort_keys=True) + "\n"
    return build_owned_object(
        job, "v1", "ConfigMap", names.format_config_name(job.name), {"data": data}, "configuration"
    )


def build_membership_map(job: JobView, membership: Membership) -> Json:
    """Build the durable record of a membership, compressed because a ConfigMap holds 1 MiB; no pod mounts it."""
    text = json.dumps(membership.to_wire(), sort_keys=True)
    packed = base64.b64encode(gzip.compress(text.encode(), compresslevel=4, mtime=0)).decode()
    content: Json = {"binaryData": {MEMBERSHIP_KEY: packed}}
    return build_owned_object(job, "v1", "ConfigMap", names.format_membership_name(job.name), content, "membership")


def render_trainer_configuration(job: JobView) -> str:
    """Return the text of trainer.yaml; empty for others. Raises ValueError when the spec contradicts itself."""
    return _render_configuration(IdentityKey(job.spec), find_checkpoint_path(job))


@lru_cache(maxsize=16)  # each plan of a job needs it; few, since specs may be large
def _render_configuration(key: IdentityKey[TrainingJobSpec], path: str) -> str:
    spec, config = key.value, key.value.workload.configure()
    if config is None:
        return ""
    # Files that grow (metrics) need a folder: the mount, which is then the pod's own.
    checkpoint = config.checkpoint.replaced(path=path)
    if spec.checkpoint.storage.uri is not None:
        checkpoint = checkpoint.replaced(records_path=CHECKPOINT_MOUNT)
    wire = config.replaced(checkpoint=checkpoint, neuron=_set_shared_cache(config.neuron, spec)).to_wire()
    return json.dumps(wire, indent=2, sort_keys=True) + "\n"


def _set_shared_cache(neuron: NeuronConfig, spec: TrainingJobSpec) -> NeuronConfig:
    """Return the job's settings; compiled graphs are on the checkpoints' volume unless the settings name a folder."""
    mounted = spec.checkpoint.storage.is_mounted
    if not spec.workload.compile_command or not mounted or neuron.shared_cache_directory is not None:
        return neuron
    return neuron.replaced(shared_cache_directory=f"{CHECKPOINT_MOUNT}/{COMPILED_FOLDER}")


def find_checkpoint_path(job: JobView) -> str:
    """Return the path of this job's checkpoints, below the mount point or the bucket's prefix.

    The pod's own volume is used as it is. The trainer creates the folder with its own user; a subPath mount would
    belong to root.
    """
    storage = job.spec.checkpoint.storage
    if not storage.is_persistent:
        return CHECKPOINT_MOUNT
    root = CHECKPOINT_MOUNT if storage.uri is None else storage.uri
    return f"{root}/{storage.sub_path or f'{job.namespace}/{job.name}'}"
