"""The number of nodes that waiting gangs of other jobs need, updated by changes of pods."""

from dataclasses import replace
from typing import Any, cast

from tests.testing.operator.job_views import job_spec, job_view
from trainium_contract.job import TrainingJobStatus
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.cache.caches import make_caches
from trainium_operator.cluster.cache.store import Entry, Key
from trainium_operator.cluster.cache.views import JobRecord
from trainium_operator.cluster.queue.waiting_gangs import WaitingGangs
from trainium_operator.plan.model.names import JobId
from trainium_operator.plan.model.observed import JobView, PodPhase, PodView
from trainium_operator.settings import Settings

WAITS = PodView(
    name="other-w-0", uid="pod", ordinal=0, phase=PodPhase.PENDING, gang="g", unschedulable_message="0/3 nodes"
)


def build_job(name: str, *, workers: int = 0, device: str = "cpu") -> JobView:
    status = TrainingJobStatus.model_validate({"idleNodes": {"wanted": workers}})
    return job_view(job_spec(workers={"accelerator": {"device": device}}), status, name=name, uid=f"uid-{name}")


class TwoJobs:
    """Two jobs, of which the first uses two idle nodes."""

    def __init__(self, device: str = "cpu") -> None:
        self.caches = make_caches(cast("Api", None), Settings())
        self.woken: list[Key] = []
        self.gangs = WaitingGangs(self.caches.jobs, self.caches.pods, wake=self.woken.append)
        self.first = build_job("first", workers=2)
        self.version = 1
        for view in (self.first, build_job("other", device=device)):
            record = JobRecord(view.namespace, view.name, view.uid, view)
            entry: Any = Entry(record, uid=view.uid, version=1, owner=None)
            self.caches.jobs.store.put((view.namespace, view.name), entry)

    def add_pod(self, view: PodView, job: str = "other") -> None:
        self.version += 1
        owner = JobId("default", job, f"uid-{job}")
        self.caches.pods.store.put(("default", view.name), Entry(view, uid="pod", version=self.version, owner=owner))


def test_a_waiting_gang_wakes_the_job_with_idle_nodes() -> None:
    jobs = TwoJobs()
    jobs.add_pod(WAITS)
    assert jobs.gangs.count_wanted_nodes(jobs.first) == 1
    assert jobs.woken == [("default", "first")]

    jobs.add_pod(replace(WAITS, node="a", unschedulable_message=""))
    assert jobs.gangs.count_wanted_nodes(jobs.first) == 0
    assert jobs.woken == [("default", "first")] * 2


def test_only_waiting_gangs_of_other_jobs_with_the_same_devices_count() -> None:
    jobs = TwoJobs()
    jobs.add_pod(replace(WAITS, name="first-w-9"), "first")
    assert jobs.gangs.count_wanted_nodes(jobs.first) == 0
    jobs.add_pod(replace(WAITS, extra=True))
    jobs.add_pod(replace(WAITS, gang=""))
    assert jobs.gangs.count_wanted_nodes(jobs.first) == 0
    different = TwoJobs(device="cuda")
    different.add_pod(WAITS)
    assert different.gangs.count_wanted_nodes(different.first) == 0


def test_deleted_pods_do_not_wait() -> None:
    jobs = TwoJobs()
    jobs.add_pod(WAITS)
    jobs.caches.pods.store.remove(("default", WAITS.name), 9)
    assert jobs.gangs.count_wanted_nodes(jobs.first) == 0
