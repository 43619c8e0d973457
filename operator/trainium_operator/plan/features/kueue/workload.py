"""Build the Workload that requests quota from Kueue. Pure.

Its pod sets contain only what decides on quota and flavors, so that no other change affects it: pod sets cannot change
while quota is reserved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_operator.plan.manifests.owned_object import build_owner_reference, compute_content_hash
from trainium_operator.plan.manifests.worker_pod import build_pod_template
from trainium_operator.plan.model import names
from trainium_operator.plan.model.quota import API_VERSION, SPARES, WORKERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_operator.plan.model.observed import JobView, PlanSettings
    from trainium_operator.plan.view.context import PodSet

Json = dict[str, Any]

KIND = "Workload"
LABEL_JOB_UID = "kueue.x-k8s.io/job-uid"
_POD_FIELDS = ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName", "overhead", "resourceClaims")
_CONTAINER_FIELDS = ("name", "resources", "restartPolicy")


def build_workload(
    job: JobView,
    settings: PlanSettings,
    *,
    part: int,
    workers: int,
    spares: int = 0,
    priority: int | None = 0,
    node_selector: Mapping[str, str] | None = None,
    pod_sets: tuple[PodSet, ...] = (),
) -> Json:
    """Build the Workload of one part; `node_selector` binds a further part to the flavor of the first.

    `priority` is the value of the job's PriorityClass; None if the class does not exist.
    """
    # A queue refuses resources that its quota does not name, and quotas for devices seldom name memory or CPU.
    template = _build_template(build_pod_template(job, settings, with_estimates=False), node_selector or {})
    counts = {WORKERS: workers, SPARES: spares}
    scheduling = job.spec.scheduling
    spec: Json = {
        "queueName": scheduling.queue_name,
        # Optional parts yield to what other jobs need, and the last quota step yields first.
        "priority": (priority or 0) - part,
        "podSets": [
            *({"name": name, "count": count, "template": template} for name, count in counts.items() if count),
            *(
                {"name": pod_set.name, "count": pod_set.count, "template": _build_template(pod_set.body, {})}
                for pod_set in pod_sets
                if pod_set.count
            ),
        ],
    }
    if scheduling.priority_class_name and priority is not None and part == 0:
        reference = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": scheduling.priority_class_name}
        spec["priorityClassRef"] = reference
    metadata = {
        "name": names.format_workload_name(job.name, part),
        "namespace": job.namespace,
        "labels": {**names.build_object_labels(job.name, "quota"), LABEL_JOB_UID: job.uid},
        "annotations": {
            names.ANNOTATION_PART: str(part),
            names.ANNOTATION_CONTENT_HASH: compute_content_hash(spec),
            names.ANNOTATION_JOB_UID: job.uid,
        },
        "ownerReferences": [build_owner_reference(job)],
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def _build_template(body: Json, node_selector: Mapping[str, str]) -> Json:
    spec = body["spec"]
    kept = {key: spec[key] for key in _POD_FIELDS if spec.get(key)}
    if node_selector:
        kept["nodeSelector"] = {**kept.get("nodeSelector", {}), **node_selector}
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity")
    if node_affinity:
        kept["affinity"] = {"nodeAffinity": node_affinity}
    for group in ("initContainers", "containers"):
        if spec.get(group):
            kept[group] = [
                {key: container[key] for key in _CONTAINER_FIELDS if key in container} for container in spec[group]
            ]
    return {"spec": {**kept, "restartPolicy": "Never"}}
