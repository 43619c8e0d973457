"""Determine which job controls an object.

Invariant: namespace, group, kind, name and uid of the controller must all match. The namespace is the object's own, as
for the garbage collector, because an owner is never in another one. Any version of the group counts, so an object of an
older operator still belongs to its job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.wire.worker_env import GROUP, KIND, LABEL_JOB
from trainium_operator.cluster.cache.parts import as_mapping
from trainium_operator.plan.model.names import JobId

if TYPE_CHECKING:
    from trainium_contract.api_server.responses import Json


def find_controlling_job(raw: Json) -> JobId | None:
    """Return the job that controls an object; None when no job does."""
    metadata = as_mapping(raw.get("metadata"))
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
    """Return whether the job's label agrees with the controller, because views take the job's name from it."""
    return bool(as_mapping(as_mapping(raw.get("metadata")).get("labels")).get(LABEL_JOB) == job.name)
