"""Build the pod that measures a milestone's model, from the template of the workers.

It has the image, variables, volumes and service account of a worker, so that it reads the same storage. It lacks what
makes a pod a member: token, devices, and affinity to workers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainium_contract.spec.precompile import PrecompileSpec
from trainium_contract.wire import worker_env as env
from trainium_operator.plan.manifests.owned_object import build_owner_reference
from trainium_operator.plan.manifests.worker_needs import WORKER_CONTAINER
from trainium_operator.plan.manifests.worker_pod import LONG_RUNNING_FIELDS, build_pod_template
from trainium_operator.plan.model import names

if TYPE_CHECKING:
    from trainium_contract.status.results import MilestoneEvaluation
    from trainium_operator.plan.model.observed import JobView, PlanSettings

Json = dict[str, Any]

TERMINATION_LOG = "/dev/termination-log"
RESULT_NAME = "milestone.json"
"""File beside the model, on storage that is a folder."""
_MIB = 1 << 20
_LIBRARY_BYTES = 2048 * _MIB
"""Memory of Python and its libraries."""
_FLOAT32_SHARE = 2
"""The model is computed in float32 on a CPU; its files have two or four bytes a number."""
_GRACE_SECONDS = 10
_WORKER_ANNOTATIONS = (env.GROUP, "karpenter.sh/", "cluster-autoscaler.kubernetes.io/")
_DROPPED_FIELDS = ("priority", "preemptionPolicy", "priorityClassName", "affinity", "schedulingGates", "resourceClaims")


def build_evaluation_pod(job: JobView, settings: PlanSettings, entry: MilestoneEvaluation, attempt: str) -> Json:
    """Build the complete manifest."""
    uncompiled = replace(job, spec=job.spec.replaced(precompile=PrecompileSpec()))
    body = build_pod_template(uncompiled, replace(settings, pod_fields=()), with_estimates=False)
    spec = {key: value for key, value in body["spec"].items() if key not in _DROPPED_FIELDS}
    instance_type = job.spec.workers.accelerator.instance_type
    selector = {key: value for key, value in (spec.get("nodeSelector") or {}).items() if value != instance_type}
    spec |= {
        "containers": [
            _build_container(item, entry) if item.get("name") == WORKER_CONTAINER else item
            for item in spec["containers"]
        ],
        "volumes": [item for item in spec.get("volumes") or [] if item.get("name") != "token"],
        "nodeSelector": selector,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
    }
    if settings.extra_priority_class:
        spec["priorityClassName"] = settings.extra_priority_class
    annotations = {
        key: value for key, value in body["metadata"]["annotations"].items() if not key.startswith(_WORKER_ANNOTATIONS)
    }
    labels = {**body["metadata"]["labels"], **names.build_object_labels(job.name, "evaluation")}
    metadata = {
        "name": names.format_evaluation_name(job.name),
        "namespace": job.namespace,
        "labels": {**labels, env.LABEL_ROLE: env.ROLE_EVALUATION},
        "annotations": {**annotations, names.ANNOTATION_EVALUATES: attempt},
        "ownerReferences": [build_owner_reference(job)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _build_container(worker: Json, entry: MilestoneEvaluation) -> Json:
    kept = {key: value for key, value in worker.items() if key not in LONG_RUNNING_FIELDS}
    # Some container runtimes expose every GPU of a node to pods that request none.
    command = ["trainium-trainer", "evaluate", entry.path, "--config", env.CONFIG_PATH, "--device", "cpu"]
    command += ["--message", TERMINATION_LOG]
    if entry.path.startswith("/"):
        command += ["--output", f"{entry.path.rstrip('/').rpartition('/')[0]}/{RESULT_NAME}"]
    memory = _LIBRARY_BYTES + entry.bytes * _FLOAT32_SHARE
    return {
        **kept,
        "command": command,
        "env": [item for item in worker.get("env") or [] if not str(item.get("name")).startswith("TRAINIUM_")],
        "volumeMounts": [item for item in worker.get("volumeMounts") or [] if item.get("name") != "token"],
        "resources": {"requests": {"cpu": "1", "memory": f"{-(-memory // _MIB)}Mi"}},
        "terminationMessagePath": TERMINATION_LOG,
    }
