"""New pods of a job use the trainer image of its running pods."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.plan_builders import SETTINGS, created, job, membership, observed, pod, running, spec, without
from trainium_contract.job import TrainingJobStatus
from trainium_operator.cluster.cache.views import pod_view
from trainium_operator.plan.manifests.worker_pod import Avoided, template_hash, worker_pods
from trainium_operator.plan.model.actions import CreatePod
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.plan import plan
from trainium_operator.plan.view.facts import pin_running_image

NEWER = replace(SETTINGS, image="trainer:2")
OLD, NEW = "trainer:1", "trainer:2"


def chosen(*pods: Any, ranks: tuple[int, ...] = (), **changes: Any) -> str:
    seen = observed(job(spec(**changes)), pods, {})
    seen = replace(seen, membership=membership(*ranks) if ranks else None)
    return pin_running_image(seen, NEWER).image


def test_the_running_workers_decide_which_image_new_ones_get() -> None:
    assert chosen() == NEW
    assert chosen(pod(0, image=OLD), pod(1, image=NEW)) == OLD
    assert chosen(pod(0, image=NEW), pod(1, image=OLD), ranks=(1,)) == OLD, "those that train before those that wait"
    assert chosen(pod(0, image=OLD), pod(1, image=NEW), ranks=(7, 1)) == NEW, "of members those whose pods are there"


@pytest.mark.parametrize("phase", [PodPhase.PENDING, PodPhase.FAILED, PodPhase.SUCCEEDED])
def test_an_image_without_running_pods_is_not_pinned(phase: PodPhase) -> None:
    assert chosen(pod(0, image=OLD, phase=phase)) == NEW


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "mine:1"},
        {"workers": {"template": {"spec": {"containers": [{"name": "worker", "image": "mine:1"}]}}}},
        {"workers": {"template": {"spec": {"containers": [{"image": "mine:1"}]}}}},
    ],
)
def test_an_image_that_the_job_names_is_not_pinned(changes: dict[str, Any]) -> None:
    assert chosen(pod(0, image="mine:0"), **changes) == NEW


def test_the_image_of_a_sidecar_is_not_the_worker_s() -> None:
    template = {"spec": {"containers": [{"name": "aside", "image": "mine:1"}, {"name": "worker", "env": []}]}}
    assert chosen(pod(0, image=OLD), workers={"template": template}) == OLD


def test_the_requested_image_is_read_back_despite_admission_changes() -> None:
    one = job(spec(workers={"template": {"spec": {"containers": [{"name": "aside", "image": "mine:1"}]}}}))
    (raw,) = worker_pods(one, SETTINGS, range(1), Avoided())
    raw = {**raw, "metadata": {**raw["metadata"], "uid": "u"}, "spec": {**raw["spec"], "containers": []}}
    seen = replace(pod_view(raw), phase=PodPhase.RUNNING)
    assert seen.image == SETTINGS.image
    assert pin_running_image(observed(one, (seen,), {}), SETTINGS) is SETTINGS


def test_a_replacement_after_an_upgrade_has_the_running_version() -> None:
    seen = running()
    seen = replace(seen, pods=tuple(replace(each, image=OLD) for each in seen.pods))
    made = plan(without(seen, 2), NEWER)
    (manifest,) = (action.manifest for action in made.actions if isinstance(action, CreatePod))
    assert manifest["spec"]["containers"][0]["image"] == OLD
    assert plan(seen, NEWER).status.outdated_pods == 0


def test_pending_pods_follow_a_new_default_image() -> None:
    one = job(status=TrainingJobStatus(desired=4, next_pod_ordinal=4))
    made = template_hash(one, SETTINGS)
    pods = tuple(pod(at, phase=PodPhase.PENDING, image=OLD, template_hash=made, node="") for at in range(4))
    result = plan(observed(one, pods, {}), NEWER)
    assert len([action for action in result.actions if type(action).__name__ == "DeletePod"]) == 4
    assert len(created(result)) == 4
