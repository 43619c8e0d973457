"""Objects as the API server stores them, with defaults for what a test does not set."""

from collections.abc import Callable
from typing import Any

from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE, ROLE_WORKER
from trainium_operator.cluster.api.resources import JOBS

Json = dict[str, Any]


def training_job(name: str = "llama", **workers: Any) -> Json:
    """Return a job of CPU workers, by default two that train 40 steps."""
    spec = {
        "workers": {"replicas": 2, "accelerator": {"device": "cpu"}, **workers},
        "trainer": {"steps": 40, "batch": {"globalSize": 12, "microSize": 1}},
    }
    return {"metadata": {"name": name, "generation": 1}, "spec": spec}


def owner_reference(job: str = "llama", uid: str = "u") -> Json:
    """Return the reference of an object that a TrainingJob controls."""
    return {"apiVersion": JOBS.api_version, "kind": JOBS.kind, "name": job, "uid": uid, "controller": True}


def worker_pod(name: str, *, owner: Json, node: str = "node-0", status: Json | None = None, **metadata: Any) -> Json:
    """Return a running worker pod of the job that the reference names."""
    labels = {LABEL_JOB: owner["name"], LABEL_ROLE: ROLE_WORKER}
    return {
        "metadata": {"name": name, "namespace": "default", "labels": labels, "ownerReferences": [owner], **metadata},
        "spec": {"nodeName": node, "containers": [{"name": "worker"}]},
        "status": {"phase": "Running"} if status is None else status,
    }


def ready_node(name: str, **spec: Any) -> Json:
    """Return a node whose kubelet reports."""
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {"metadata": {"name": name}, "spec": spec, "status": {"conditions": [ready]}}


def bind_pod(node: str, number: int) -> Callable[[Json], None]:
    """Return a change that binds a pod to this node and starts it, as scheduler and kubelet do."""

    def change(raw: Json) -> None:
        raw["spec"]["nodeName"] = node
        raw["status"] = {
            "phase": "Running",
            "podIP": f"10.{number // 62500}.{number // 250 % 250}.{number % 250 + 1}",
            "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "worker", "state": {"running": {}}}],
        }

    return change


def terminated_status(name: str = "worker", **state: Any) -> Json:
    """Return the status of a container that has ended, by default with code 1."""
    return {"name": name, "state": {"terminated": {"exitCode": 1, "reason": "Error", **state}}}


def end_worker(code: int, reason: str, phase: str, message: str = "") -> Callable[[Json], None]:
    """Return a change of a pod that terminates its worker container."""

    def change(raw: Json) -> None:
        ended = terminated_status(exitCode=code, reason=reason, finishedAt="2026-01-01T01:00:00Z", message=message)
        raw["status"] |= {"phase": phase, "containerStatuses": [ended]}

    return change
