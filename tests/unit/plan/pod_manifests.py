"""Manifests of worker pods, and what tests read in them."""

from typing import Any

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import SETTINGS
from trainium_contract.job import TrainingJobSpec
from trainium_operator.plan.manifests.affinity import AvoidedNodes
from trainium_operator.plan.manifests.worker_pod import build_worker_pods
from trainium_operator.plan.model.observed import JobView, PlanSettings


def worker_pod(
    job: TrainingJobSpec | JobView | None = None,
    settings: PlanSettings = SETTINGS,
    *,
    ordinal: int = 0,
    avoided: AvoidedNodes | None = None,
) -> Any:
    """Return the manifest of one worker of a job."""
    view = job if isinstance(job, JobView) else build.job(job)
    (manifest,) = build_worker_pods(view, settings, range(ordinal, ordinal + 1), avoided or AvoidedNodes())
    return manifest


def container(manifest: Any) -> Any:
    """Return the container of the worker."""
    return manifest["spec"]["containers"][0]


def environment(manifest: Any) -> dict[str, Any]:
    """Return the variables of the worker, with their values or where those come from."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container(manifest)["env"]}


def volumes(manifest: Any) -> dict[str, Any]:
    """Return the volumes of a pod by name."""
    return {volume["name"]: volume for volume in manifest["spec"]["volumes"]}
