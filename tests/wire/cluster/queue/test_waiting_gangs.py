"""Which jobs' gangs wait for nodes like those of another, kept up by changes of pods alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_operator.cluster.cache.store import Entry, Key
from trainium_operator.cluster.cache.views import JobRecord
from trainium_operator.cluster.queue.waiting_gangs import WaitingGangs
from trainium_operator.plan.model.names import JobId
from trainium_operator.plan.model.observed import JobView, PodPhase, PodView
from trainium_operator.runtime import make_caches
from trainium_operator.settings import Settings

if TYPE_CHECKING:
    from trainium_operator.cluster.api.client import Api

WAITS = PodView(
    name="other-w-0", uid="pod", ordinal=0, phase=PodPhase.PENDING, gang="g", unschedulable_message="0/3 nodes"
)


def job(name: str, *, wanted: int = 0, device: str = "cpu") -> JobView:
    return JobView(
        namespace="default",
        name=name,
        uid=f"uid-{name}",
        generation=1,
        deleting=False,
        spec=TrainingJobSpec.model_validate({"workers": {"accelerator": {"device": device}}}),
        status=TrainingJobStatus.model_validate({"idleNodes": {"wanted": wanted}}),
        created=0.0,
    )


class Scene:
    """Two jobs, of which the first has taken two idle nodes."""

    def __init__(self, device: str = "cpu") -> None:
        self.caches = make_caches(cast("Api", None), Settings())
        self.woken: list[Key] = []
        self.gangs = WaitingGangs(self.caches.jobs, self.caches.pods, wake=self.woken.append)
        self.first = job("first", wanted=2)
        self.version = 1
        for view in (self.first, job("other", device=device)):
            record = JobRecord(view.namespace, view.name, view.uid, view)
            entry: Any = Entry(record, uid=view.uid, version=1, owner=None)
            self.caches.jobs.store.put((view.namespace, view.name), entry)

    def pod(self, view: PodView, job: str = "other") -> None:
        self.version += 1
        owner = JobId("default", job, f"uid-{job}")
        self.caches.pods.store.put(("default", view.name), Entry(view, uid="pod", version=self.version, owner=owner))


def test_a_gang_that_waits_is_counted_and_the_job_that_may_give_way_is_woken() -> None:
    scene = Scene()
    scene.pod(WAITS)
    assert scene.gangs.nodes_wanted(scene.first) == 1
    assert scene.woken == [("default", "first")]

    scene.pod(replace(WAITS, node="a", unschedulable_message=""))
    assert scene.gangs.nodes_wanted(scene.first) == 0
    assert scene.woken == [("default", "first")] * 2


def test_nobody_gives_way_to_himself_to_other_devices_to_extras_or_to_single_pods() -> None:
    scene = Scene()
    scene.pod(replace(WAITS, name="first-w-9"), "first")
    assert scene.gangs.nodes_wanted(scene.first) == 0
    scene.pod(replace(WAITS, extra=True))
    scene.pod(replace(WAITS, gang=""))
    assert scene.gangs.nodes_wanted(scene.first) == 0
    different = Scene(device="cuda")
    different.pod(WAITS)
    assert different.gangs.nodes_wanted(different.first) == 0


def test_pods_that_go_wait_no_longer() -> None:
    scene = Scene()
    scene.pod(WAITS)
    scene.caches.pods.store.remove(("default", WAITS.name), 9)
    assert scene.gangs.nodes_wanted(scene.first) == 0
