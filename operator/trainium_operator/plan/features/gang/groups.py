"""Build the object of each gang API and its marks on pods.

Field names were read from API servers and their sources: scheduling.k8s.io v1alpha1 (Kubernetes 1.35: Workload,
`pod.spec.workloadRef`), v1alpha2 (1.36) and v1alpha3, v1beta1 (1.37: PodGroup, `pod.spec.schedulingGroup`);
scheduling.x-k8s.io v1alpha1.

Invariants: an object's name follows from its content, because these objects cannot be changed, and from the job's uid,
because that of an earlier job of this name may still be terminating. The job owns it, so it is deleted with the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.spec.scheduling import Gang
from trainium_contract.wire.worker_env import GROUP, KIND
from trainium_operator.plan.manifests.owned_object import build_owner_reference, compute_content_hash
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import Action, ApplyGroup
from trainium_operator.plan.model.names import ANNOTATION_GROUP
from trainium_operator.plan.model.observed import GangApi, JobView, PodPhase
from trainium_operator.plan.view.context import Feature, PlanContext
from trainium_operator.plan.view.size import count_needed_workers

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.observed import Observed, PlanSettings
    from trainium_operator.plan.view.workers import Worker

Json = dict[str, Any]

_BY_SPEC = {
    Gang.NATIVE: (GangApi.SCHEDULING_GROUP, GangApi.WORKLOAD_REF),
    Gang.COSCHEDULING: (GangApi.COSCHEDULING,),
    Gang.AUTO: (GangApi.SCHEDULING_GROUP, GangApi.WORKLOAD_REF, GangApi.COSCHEDULING),
    Gang.NONE: (),
}
_COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
_WORKLOAD_GROUP = "workers"
"""Name of the only pod group in a Workload of Kubernetes 1.35."""


def build_group_object(job: JobView, api: GangApi, api_version: str, min_count: int) -> Json | None:
    """Return the object of a gang of at least `min_count` pods; None for an API without one."""
    if api is GangApi.SCHEDULING_GROUP:
        spec: Json = {"schedulingPolicy": {"gang": {"minCount": min_count}}}
        if job.spec.scheduling.priority_class_name:
            spec["priorityClassName"] = job.spec.scheduling.priority_class_name
        return _build_object(job, api_version, "PodGroup", spec)
    if api is GangApi.WORKLOAD_REF:
        spec = {
            "controllerRef": {"apiGroup": GROUP, "kind": KIND, "name": job.name},
            "podGroups": [{"name": _WORKLOAD_GROUP, "policy": {"gang": {"minCount": min_count}}}],
        }
        return _build_object(job, api_version, "Workload", spec)
    if api is GangApi.COSCHEDULING:
        return _build_object(job, api_version, "PodGroup", {"minMember": min_count})
    return None


def join_group(pod: Json, api: GangApi, group: str) -> Json:
    """Mark the pod as a member of the group, if the API has group objects."""
    old = pod["metadata"].get("annotations", {})
    pod = {**pod, "metadata": {**pod["metadata"], "annotations": {**old, ANNOTATION_GROUP: group}}}
    if api is GangApi.SCHEDULING_GROUP:
        return {**pod, "spec": {**pod["spec"], "schedulingGroup": {"podGroupName": group}}}
    if api is GangApi.WORKLOAD_REF:
        return {**pod, "spec": {**pod["spec"], "workloadRef": {"name": group, "podGroup": _WORKLOAD_GROUP}}}
    labels = {**pod["metadata"].get("labels", {}), _COSCHEDULING_LABEL: group}
    return {**pod, "metadata": {**pod["metadata"], "labels": labels}}


def _build_object(job: JobView, api_version: str, kind: str, spec: Json) -> Json:
    content = {"apiVersion": api_version, "kind": kind, "spec": spec}
    metadata = {
        "name": f"{job.name}-{compute_content_hash({**content, 'uid': job.uid})[:8]}",
        "namespace": job.namespace,
        "labels": names.build_object_labels(job.name, "gang"),
        "ownerReferences": [build_owner_reference(job)],
    }
    return {**content, "metadata": metadata}


def find_gang_api(context: PlanContext) -> GangApi:
    """Return the gang API that starts all workers of this job together."""
    served = context.settings.gang_apis
    return next((api for api in _BY_SPEC[context.job.spec.scheduling.gang] if api in served), GangApi.NONE)


def needs_whole_gang(context: PlanContext, status: PublicStatus) -> bool:
    """Return whether a new pod gets no node before all of its group exist."""
    return status.membership.size == 0 and _build_group(context) is not None


def is_misplaced(context: PlanContext, status: PublicStatus, worker: Worker) -> bool:
    """Return whether a pod without a node waits in a group that can no longer get it onto one."""
    pod = worker.pod
    if not pod.gang or pod.node or pod.phase is not PodPhase.PENDING or worker.agent is not None:
        return False
    group = _build_group(context) if status.membership.size == 0 else None
    return group is None or pod.gang != group["metadata"]["name"]


def _build_group(context: PlanContext) -> dict[str, Any] | None:
    api, min_count = find_gang_api(context), count_needed_workers(context.size)
    version = context.settings.gang_apis.get(api, "")
    return build_group_object(context.job, api, version, min_count) if version and min_count > 1 else None


def place_pods(
    context: PlanContext, status: PublicStatus, manifests: list[Json]
) -> tuple[tuple[Action, ...], list[Json]]:
    """Return the gang's object, and the new pods marked for it.

    New pods of a job that trains are not part of a gang.
    """
    group = _build_group(context) if status.membership.size == 0 else None
    if group is None:
        return (), manifests
    api = find_gang_api(context)
    return (ApplyGroup(group),), [join_group(pod, api, group["metadata"]["name"]) for pod in manifests]


def describe_wait(context: PlanContext) -> str:
    """Return how the workers wait for their nodes, as the rest of a sentence."""
    wanted, api = context.job.spec.scheduling.gang, find_gang_api(context)
    if wanted in (Gang.NATIVE, Gang.COSCHEDULING) and api is GangApi.NONE:
        return f" (this cluster does not serve the requested gang API, {wanted.value})"
    return "" if api is GangApi.NONE else f" (they wait as a gang, {api.value})"


def _is_used(observed: Observed, settings: PlanSettings) -> bool:
    wanted = observed.job.spec.scheduling.gang
    served = wanted is Gang.AUTO and bool(settings.gang_apis)
    return served or wanted in (Gang.NATIVE, Gang.COSCHEDULING) or any(pod.gang for pod in observed.pods)


FEATURE = Feature(
    name="gang scheduling",
    is_used=_is_used,
    place_pods=place_pods,
    creates_as_a_whole=needs_whole_gang,
    is_misplaced=is_misplaced,
    describe_wait=describe_wait,
)
