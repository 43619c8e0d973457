"""Policy: the ConfigMap with the trainer's configuration is there before the pods that mount it, and never stale.

What a newer version wrote for parts of the spec that this one does not know is left as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.manifests.config_maps import config_map
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import Answer, ApplyObject

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.facts import Facts


def converge_configuration(facts: Facts, status: TrainingJobStatus) -> Answer:
    """Apply the configuration where it is missing or stale."""
    if facts.now < facts.observed.creations_from:
        return Answer(status=status, looks=(facts.observed.creations_from,))
    if facts.size.shape is None:
        return Answer(status=status)
    manifest = config_map(facts.job, facts.observed.ca_bundle)
    metadata = manifest["metadata"]
    wanted = metadata["annotations"][names.ANNOTATION_CONTENT_HASH]
    present = facts.observed.children.get(f"{manifest['kind']}/{metadata['name']}")
    if present == wanted or (present is not None and facts.job.unknown):
        return Answer(status=status)
    return Answer(status=status, actions=(ApplyObject(manifest),))
