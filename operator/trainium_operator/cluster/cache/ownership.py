"""To which job an object of the cluster belongs: read off the object here, and nowhere else.

Invariant: all of namespace, group, kind, name and uid of the controller count. The namespace is the object's own, as
for the garbage collector: an owner never is in another one. Any version of our group counts, so that an object of an
older operator stays the job's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.wire.worker_env import GROUP, KIND, LABEL_JOB
from trainium_operator.cluster.cache.parts import mapping_of
from trainium_operator.plan.model.names import JobId

if TYPE_CHECKING:
    from trainium_operator.cluster.api.client import Json


def controlling_job(raw: Json) -> JobId | None:
    """Return the job that controls an object; None when no job does."""
    metadata = mapping_of(raw.get("metadata"))
    references = metadata.get("ownerReferences")
    for reference in references if isinstance(references, list) else ():
        if not isinstance(reference, dict) or reference.get("controller") is not True:
            continue
        group = str(reference.get("apiVersion", "")).rpartition("/")[0]
        name, uid, namespace = reference.get("name"), reference.get("uid"), metadata.get("namespace")
        if (group, reference.get("kind")) != (GROUP, KIND) or not (name and uid and namespace):
            return None
        return JobId(str(namespace), str(name), str(uid))
    return None


def is_labelled(raw: Json, job: JobId) -> bool:
    """Return whether the job's label agrees with the controller: views take the name from it."""
    return bool(mapping_of(mapping_of(raw.get("metadata")).get("labels")).get(LABEL_JOB) == job.name)
