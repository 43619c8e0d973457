"""Why a pod that has a node does not start, read from its events: seldom, for one pod, and only what still holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.api.fake_kubernetes import FakeCluster, refuse
from tests.testing.suite.virtual_time import run_virtual
from tests.testing.virtual.operator_process import training_job
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import CORE_EVENTS, JOBS, PODS
from trainium_operator.cluster.queue.pod_warnings import FRESH_SECONDS, PAUSE_SECONDS, SLOW_SECONDS, PodWarnings
from trainium_operator.plan.model import names
from trainium_operator.runtime import make_caches
from trainium_operator.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.plan.model.observed import JobView, PodView

CREATED = 1767225600.0
"""2026-01-01T00:00:00Z"""
MISSING = 'MountVolume.SetUp failed for volume "s" : secret "not-there" not found'


class World:
    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.job_raw = self.cluster.add(JOBS, training_job("j"))
        api = Api(self.cluster)
        self.caches = make_caches(api, Settings())
        self.now = CREATED
        self.warnings = PodWarnings(api, self.caches.pods, lambda: self.now)

    def pod(self, ordinal: int = 0, *, init: dict[str, Any] | None = None, node: str = "n") -> None:
        owner = {"apiVersion": JOBS.api_version, "kind": JOBS.kind, "name": "j", "controller": True}
        waiting = {"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}
        raw = {
            "metadata": {
                "name": f"j-w-{ordinal}",
                "uid": f"uid-{ordinal}",
                "namespace": "default",
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": {**names.object_labels("j", "worker"), **names.selector_labels("j")},
                "ownerReferences": [{**owner, "uid": self.job_raw["metadata"]["uid"]}],
            },
            "spec": {"nodeName": node},
            "status": {
                "phase": "Pending",
                "containerStatuses": [waiting],
                "initContainerStatuses": [init] if init else [],
            },
        }
        self.caches.pods.write_through(self.cluster.add(PODS, raw))

    def event(self, reason: str, message: str, stamp: str, name: str = "e") -> None:
        self.cluster.add(
            CORE_EVENTS,
            {"metadata": {"name": name}, "reason": reason, "message": message, "lastTimestamp": stamp},
        )

    @property
    def job(self) -> JobView:
        record = self.caches.jobs.store.get(("default", "j"))
        assert record is not None
        assert record.view is not None
        return record.view

    def lists(self) -> int:
        return sum(path.endswith("/events") for _, path in self.cluster.requests)

    async def read(self) -> PodView:
        await self.warnings.refresh(self.job)
        pods = tuple(self.caches.pods.store.owned_by(self.job.id).values())
        return self.warnings.applied_to(self.job, pods)[0]


def scenario(run: Callable[[World], Any]) -> None:
    async def whole() -> None:
        world = World()
        await world.caches.jobs.refresh()
        await run(world)

    run_virtual(whole())


def test_a_volume_that_cannot_be_mounted_is_read_from_the_event_once_the_pod_starts_slowly() -> None:
    async def run(world: World) -> None:
        world.pod()
        world.event("FailedScheduling", "0/3 nodes", "2026-01-01T00:00:09Z", "older")
        world.event("FailedMount", MISSING, "2026-01-01T00:00:08Z")
        world.now += SLOW_SECONDS - 1
        assert (await world.read()).reason == "ContainerCreating"
        assert world.warnings.next_in(world.job) == 1.0
        assert world.lists() == 0
        world.now += 1
        seen = await world.read()
        assert (seen.reason, seen.message) == ("FailedMount", MISSING)
        assert (await world.read()).reason == "FailedMount"
        assert world.lists() == 1, "not at every plan"
        assert world.warnings.next_in(world.job) == PAUSE_SECONDS

    scenario(run)


def test_a_warning_that_is_not_repeated_is_not_shown_for_long() -> None:
    async def run(world: World) -> None:
        world.pod()
        world.event("FailedMount", MISSING, "2026-01-01T00:00:08Z")
        world.now += SLOW_SECONDS + FRESH_SECONDS
        assert (await world.read()).reason == "ContainerCreating"

    scenario(run)


@pytest.mark.parametrize("case", ["no node", "an init container runs"])
def test_nothing_is_listed_for_a_pod_whose_status_names_its_problem(case: str) -> None:
    async def run(world: World) -> None:
        if case == "no node":
            world.pod(node="")
        else:
            world.pod(init={"name": "fetch", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}})
        world.now += 100
        await world.read()
        assert world.lists() == 0
        assert world.warnings.next_in(world.job) is None

    scenario(run)


def test_without_the_right_to_list_events_plans_go_on() -> None:
    async def run(world: World) -> None:
        world.pod()
        world.cluster.faults.append(
            lambda _method, path: refuse(403, "Forbidden", "no") if path.endswith("/events") else None
        )
        world.now += SLOW_SECONDS
        assert (await world.read()).reason == "ContainerCreating"
        assert world.warnings.next_in(world.job) == PAUSE_SECONDS

    scenario(run)
