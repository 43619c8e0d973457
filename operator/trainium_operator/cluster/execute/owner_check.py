"""Check whose object an existing one is, before a write replaces its content.

Guarantees:
- An object of another owner is never written.
- An object of an earlier job of this name, which `kubectl delete --cascade=orphan` left, becomes this job's, and all of
  its content is replaced. Such an object has the labels of the job, the uid of another job in its annotation, and no
  controller, and a live read confirms that the name belongs to this job.
- An object with this job's own uid there gets back its owner.
- A Workload, whose content Kueue protects, is deleted instead. A pod is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.api_server import errors
from trainium_contract.wire.worker_env import FIELD_MANAGER, LABEL_JOB
from trainium_operator.cluster.api.resources import (
    DISRUPTION_BUDGETS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    WORKLOADS,
)
from trainium_operator.cluster.cache.ownership import find_controlling_job
from trainium_operator.cluster.cache.parts import as_mapping, as_text
from trainium_operator.plan.model.actions import Event
from trainium_operator.plan.model.names import ANNOTATION_JOB_UID
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.api.resources import Resource
    from trainium_operator.cluster.execute.events import EventRecorder
    from trainium_operator.cluster.queue.refusal_backoff import RefusalBackoff
    from trainium_operator.plan.model.observed import JobView

_OPTIONAL = (NETWORK_POLICIES, DISRUPTION_BUDGETS)


@dataclass(frozen=True, slots=True)
class OwnerCheck:
    """Checks owners; one for each process."""

    api: Api
    recorder: EventRecorder
    backoff: RefusalBackoff

    async def check(self, job: JobView, resource: Resource, current: Json) -> bool:
        """Return whether a deleted job of this name left the object, so that nothing of its content may be kept.

        Raises NotOursError, also while the garbage collector has to delete an earlier job's object.
        """
        name = current["metadata"]["name"]
        place = f"{resource.kind}/{name}"
        owner = find_controlling_job(current)
        if owner == job.id:
            self.backoff.clear_name_conflict(job.uid, place)
            return False
        if owner is not None and (owner.namespace, owner.name) == (job.namespace, job.name):
            sentence = f"{resource.kind} {name} belongs to an earlier job of this name; waiting until it is deleted"
            raise self._refuse(job, resource, name, sentence)
        written_for = _find_writer(job, current) if resource != PODS else ""
        if written_for:
            if written_for != job.uid:
                await self._adopt(job, resource, current, written_for)
            self.backoff.clear_name_conflict(job.uid, place)
            return written_for != job.uid
        sentence = (
            f"{resource.kind} {name} exists and does not belong to this job; it is left alone: delete it, or give the "
            "job another name"
        )
        raise self._refuse(job, resource, name, sentence)

    def _refuse(self, job: JobView, resource: Resource, name: str, sentence: str) -> errors.NotOursError:
        """Record and return why the object is not written."""
        if resource not in (PODS, *_OPTIONAL):  # a new attempt renames the pod
            self.backoff.record_name_conflict(job.uid, f"{resource.kind}/{name}", sentence)
        return errors.NotOursError(sentence, status=409)

    async def _adopt(self, job: JobView, resource: Resource, current: Json, left_by: str) -> None:
        """Confirm that the object's job no longer exists, and report what becomes of the object."""
        metadata = current["metadata"]
        try:
            live = await self.api.get(JOBS, job.namespace, job.name)
        except errors.NotFoundError as error:
            raise errors.ConflictError(f"TrainingJob {job.name} was deleted meanwhile", status=409) from error
        if live["metadata"]["uid"] != job.uid:
            raise errors.ConflictError(f"TrainingJob {job.name} was created again meanwhile", status=409)
        origin = f"{resource.kind} {metadata['name']} was left by an earlier job of this name (uid {left_by})"
        if resource == WORKLOADS:
            await self.api.delete(resource, job.namespace, metadata["name"], uid=metadata["uid"])
            self._report(job, f"{origin} and is deleted")
            raise self._refuse(job, resource, metadata["name"], f"{origin}; waiting until it is deleted")
        self._report(job, f"{origin} and becomes this job's")

    def _report(self, job: JobView, text: str) -> None:
        self.recorder.record(job.id, Event(reason=Reason.ORPHAN_ADOPTED, note=text))


def _find_writer(job: JobView, current: Json) -> str:
    """Return the uid of the job of this name that an object without a controller was written for; empty if unknown."""
    metadata = current["metadata"]
    labels, annotations = as_mapping(metadata.get("labels")), as_mapping(metadata.get("annotations"))
    references = metadata.get("ownerReferences") or ()
    is_controlled = any(as_mapping(reference).get("controller") is True for reference in references)
    is_ours = labels.get(LABEL_JOB) == job.name and labels.get("app.kubernetes.io/managed-by") == FIELD_MANAGER
    return as_text(annotations.get(ANNOTATION_JOB_UID)) if is_ours and not is_controlled else ""
