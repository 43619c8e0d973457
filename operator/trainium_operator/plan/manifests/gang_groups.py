"""What each gang API needs: its object and its marks on pods. Pure construction, one function per API.

Field names were read from API servers and their sources, not from memory: scheduling.k8s.io v1alpha1 (Kubernetes 1.35:
Workload, `pod.spec.workloadRef`), v1alpha2 (1.36) and v1alpha3, v1beta1 (1.37: PodGroup, `pod.spec.schedulingGroup`);
scheduling.x-k8s.io v1alpha1; Kueue's pod groups. Invariants: an object's name follows from its content, because these
objects cannot be changed; the job owns it, so it goes with the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.spec.scheduling import Topology
from trainium_contract.wire.worker_env import GROUP, KIND
from trainium_operator.plan.manifests.owned_object import content_hash, owner_reference
from trainium_operator.plan.model import names
from trainium_operator.plan.model.node_labels import LAYERS
from trainium_operator.plan.model.observed import GangApi

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import JobView

Json = dict[str, Any]

ANNOTATION_GROUP = f"{GROUP}/gang"
"""On a worker pod: name of the group that it was made for."""
KUEUE_GATE = "kueue.x-k8s.io/admission"
_KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
_KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
_KUEUE_TOTAL = "kueue.x-k8s.io/pod-group-total-count"
_KUEUE_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
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


def queue(pod: Json, job: JobView, group: str, total: int) -> Json:
    """The pod held back until Kueue admits it: in a group of `total` pods, or alone when the group's name is empty.

    Pods of one group must look alike to Kueue, so what keeps them from single nodes is taken out. A pod that is alone
    replaces nothing that holds quota.
    """
    scheduling = job.spec.scheduling
    pod = _labelled(pod, {_KUEUE_QUEUE: scheduling.queue_name} | ({_KUEUE_GROUP: group} if group else {}))
    if group:
        pod = _annotated(pod, {ANNOTATION_GROUP: group, _KUEUE_TOTAL: str(total)})
        pod = {**pod, "spec": _alike(pod["spec"])}
        if scheduling.topology is Topology.REQUIRED:
            pod = _annotated(pod, {_KUEUE_TOPOLOGY: LAYERS[0]})
    gates = [*(pod["spec"].get("schedulingGates") or []), {"name": KUEUE_GATE}]
    return {**pod, "spec": {**pod["spec"], "schedulingGates": gates}}


def _alike(spec: Json) -> Json:
    """The pod spec without the terms of node affinity that name nodes."""
    affinity = dict(spec.get("affinity") or {})
    node = dict(affinity.pop("nodeAffinity", None) or {})
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = [_without_hosts(term) for term in (node.pop(key, None) or {}).get("nodeSelectorTerms") or ()]
    if terms and all(terms):
        node[key] = {"nodeSelectorTerms": terms}
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    wishes = [{**each, "preference": _without_hosts(each["preference"])} for each in node.pop(key, None) or ()]
    wishes = [each for each in wishes if each["preference"]]
    if wishes:
        node[key] = wishes
    if node:
        affinity["nodeAffinity"] = node
    rest = {field: value for field, value in spec.items() if field != "affinity"}
    return {**rest, "affinity": affinity} if affinity else rest


def _without_hosts(term: Json) -> Json:
    kept = [each for each in term.get("matchExpressions") or () if each["key"] != "kubernetes.io/hostname"]
    rest = {field: value for field, value in term.items() if field != "matchExpressions"}
    return {**rest, "matchExpressions": kept} if kept else rest


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
