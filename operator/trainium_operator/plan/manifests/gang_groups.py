"""What each gang API needs: its object and its marks on pods. Pure construction, one function per API.

Field names were read from API servers and their sources, not from memory: scheduling.k8s.io v1alpha1 (Kubernetes 1.35:
Workload, `pod.spec.workloadRef`), v1alpha2 (1.36) and v1alpha3, v1beta1 (1.37: PodGroup, `pod.spec.schedulingGroup`);
scheduling.x-k8s.io v1alpha1. Invariants: an object's name follows from its content, because these
objects cannot be changed; the job owns it, so it goes with the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.wire.worker_env import GROUP, KIND
from trainium_operator.plan.manifests.owned_object import content_hash, owner_reference
from trainium_operator.plan.model import names
from trainium_operator.plan.model.observed import GangApi

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import JobView

Json = dict[str, Any]

ANNOTATION_GROUP = f"{GROUP}/gang"
"""On a worker pod: name of the group that it was made for."""
_COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
_WORKLOAD_GROUP = "workers"
"""Name of the only pod group within a Workload of Kubernetes 1.35."""


def group_object(job: JobView, api: GangApi, api_version: str, least: int) -> Json | None:
    """The object that makes a gang of at least `least` pods; None for an API without one."""
    if api is GangApi.SCHEDULING_GROUP:
        spec: Json = {"schedulingPolicy": {"gang": {"minCount": least}}}
        if job.spec.scheduling.priority_class_name:
            spec["priorityClassName"] = job.spec.scheduling.priority_class_name
        return _object(job, api_version, "PodGroup", spec)
    if api is GangApi.WORKLOAD_REF:
        spec = {
            "controllerRef": {"apiGroup": GROUP, "kind": KIND, "name": job.name},
            "podGroups": [{"name": _WORKLOAD_GROUP, "policy": {"gang": {"minCount": least}}}],
        }
        return _object(job, api_version, "Workload", spec)
    if api is GangApi.COSCHEDULING:
        return _object(job, api_version, "PodGroup", {"minMember": least})
    return None


def mark(pod: Json, api: GangApi, group: str) -> Json:
    """The pod as a member of the group, by an API that has an object for it."""
    pod = _annotated(pod, {ANNOTATION_GROUP: group})
    if api is GangApi.SCHEDULING_GROUP:
        return {**pod, "spec": {**pod["spec"], "schedulingGroup": {"podGroupName": group}}}
    if api is GangApi.WORKLOAD_REF:
        return {**pod, "spec": {**pod["spec"], "workloadRef": {"name": group, "podGroup": _WORKLOAD_GROUP}}}
    return _labelled(pod, {_COSCHEDULING_LABEL: group})


def _object(job: JobView, api_version: str, kind: str, spec: Json) -> Json:
    content = {"apiVersion": api_version, "kind": kind, "spec": spec}
    metadata = {
        "name": f"{job.name}-{content_hash(content)[:8]}",
        "namespace": job.namespace,
        "labels": names.object_labels(job.name, "gang"),
        "ownerReferences": [owner_reference(job)],
    }
    return {**content, "metadata": metadata}


def _labelled(pod: Json, labels: dict[str, str]) -> Json:
    return {**pod, "metadata": {**pod["metadata"], "labels": {**pod["metadata"].get("labels", {}), **labels}}}


def _annotated(pod: Json, annotations: dict[str, str]) -> Json:
    old = pod["metadata"].get("annotations", {})
    return {**pod, "metadata": {**pod["metadata"], "annotations": {**old, **annotations}}}
