"""Which image new pods of a job get where it names none: that of the workers it trains with.

The default is the operator's and changes with it. Ranks of two versions of the trainer must not meet: what they tell
each other while they start has no version. So the image of an earlier default stays with a job until no worker of it
runs: until it is suspended, or has lost all of them. Invariant: what the job itself names wins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_operator.plan.manifests.requests import WORKER_CONTAINER
from trainium_operator.plan.manifests.worker_pod import named_worker
from trainium_operator.plan.model.observed import PodPhase

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec
    from trainium_operator.plan.model.observed import Observed, PlanSettings


def with_image_of_run(observed: Observed, settings: PlanSettings) -> PlanSettings:
    """The settings with the image of the workers that run: of the lowest rank, else of the oldest pod."""
    running = {pod.uid: pod.image for pod in observed.pods if pod.phase is PodPhase.RUNNING and pod.image}
    if not running or _names_image(observed.job.spec):
        return settings
    members = observed.membership.members if observed.membership is not None else ()
    of_members = (running[member.pod_uid] for member in members if member.pod_uid in running)
    image = next(of_members, None) or next(iter(running.values()))
    return settings if image == settings.image else replace(settings, image=image)


def _names_image(spec: TrainingJobSpec) -> bool:
    """Whether the job names the worker's image, in the field for it or in its template."""
    containers = (named_worker(spec.workers.template).get("spec") or {}).get("containers")
    listed = containers if isinstance(containers, list) else []
    worker = (each for each in listed if isinstance(each, dict) and each.get("name") == WORKER_CONTAINER)
    return bool(spec.image) or any(each.get("image") for each in worker)
