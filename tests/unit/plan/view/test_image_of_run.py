"""New pods of a job use the trainer image of its running pods."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import SETTINGS
from tests.unit.plan.plan_results import make_plan
from tests.unit.plan.pod_manifests import worker_pod
from trainium_contract.job import TrainingJobStatus
from trainium_operator.cluster.cache.views import parse_worker_pod
from trainium_operator.plan.manifests.worker_pod import compute_template_hash
from trainium_operator.plan.model.actions import CreatePod
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.view.context import pin_running_image

NEWER = replace(SETTINGS, image="trainer:2")
OLD, NEW = "trainer:1", "trainer:2"


def pinned_image(*pods: Any, ranks: tuple[int, ...] = (), **changes: Any) -> str:
    observed = build.observation(build.job(build.spec(**changes)), pods, {})
    observed = replace(observed, membership=build.membership(*ranks) if ranks else None)
    return pin_running_image(observed, NEWER).image


def test_the_running_workers_decide_which_image_new_ones_get() -> None:
    assert pinned_image() == NEW
    assert pinned_image(build.pod(0, image=OLD), build.pod(1, image=NEW)) == OLD
    assert pinned_image(build.pod(0, image=NEW), build.pod(1, image=OLD), ranks=(1,)) == OLD, (
        "those that train before those that wait"
    )
    assert pinned_image(build.pod(0, image=OLD), build.pod(1, image=NEW), ranks=(7, 1)) == NEW, (
        "of members those whose pods are there"
    )


@pytest.mark.parametrize("phase", [PodPhase.PENDING, PodPhase.FAILED, PodPhase.SUCCEEDED])
def test_an_image_without_running_pods_is_not_pinned(phase: PodPhase) -> None:
    assert pinned_image(build.pod(0, image=OLD, phase=phase)) == NEW


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "mine:1"},
        {"workers": {"template": {"spec": {"containers": [{"name": "worker", "image": "mine:1"}]}}}},
        {"workers": {"template": {"spec": {"containers": [{"image": "mine:1"}]}}}},
    ],
)
def test_an_image_that_the_job_names_is_not_pinned(changes: dict[str, Any]) -> None:
    assert pinned_image(build.pod(0, image="mine:0"), **changes) == NEW


def test_the_image_of_a_sidecar_is_not_the_worker_s() -> None:
    template = {"spec": {"containers": [{"name": "aside", "image": "mine:1"}, {"name": "worker", "env": []}]}}
    assert pinned_image(build.pod(0, image=OLD), workers={"template": template}) == OLD


def test_the_requested_image_is_read_back_despite_admission_changes() -> None:
    view = build.job(build.spec(workers={"template": {"spec": {"containers": [{"name": "aside", "image": "mine:1"}]}}}))
    raw = worker_pod(view)
    raw = {**raw, "metadata": {**raw["metadata"], "uid": "u"}, "spec": {**raw["spec"], "containers": []}}
    pod = replace(parse_worker_pod(raw), phase=PodPhase.RUNNING)
    assert pod.image == SETTINGS.image
    assert pin_running_image(build.observation(view, (pod,), {}), SETTINGS) is SETTINGS


def test_a_replacement_after_an_upgrade_has_the_running_version() -> None:
    observed = build.running_job()
    observed = replace(observed, pods=tuple(replace(pod, image=OLD) for pod in observed.pods))
    digest = make_plan(build.without_pods(observed, 2), NEWER)
    (manifest,) = (action.manifest for action in digest.actions if isinstance(action, CreatePod))
    assert manifest["spec"]["containers"][0]["image"] == OLD
    assert make_plan(observed, NEWER).status.outdated_pods == 0


def test_pending_pods_follow_a_new_default_image() -> None:
    view = build.job(status=TrainingJobStatus(desired=4, next_pod_ordinal=4))
    digest = compute_template_hash(view, SETTINGS)
    pods = tuple(
        build.pod(ordinal, phase=PodPhase.PENDING, image=OLD, template_hash=digest, node="") for ordinal in range(4)
    )
    result = make_plan(build.observation(view, pods, {}), NEWER)
    assert len(result.deleted_pods) == 4
    assert len(result.created_pods) == 4
