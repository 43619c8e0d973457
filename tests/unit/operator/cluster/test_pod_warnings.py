"""Warnings of pods that do not start: events are listed rarely, and only fresh ones are shown."""

from typing import Any

import pytest

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.api.objects import owner_reference, training_job, worker_pod
from tests.testing.suite.virtual_time import in_virtual_time
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import EVENTS, JOBS, PODS
from trainium_operator.cluster.cache.caches import make_caches
from trainium_operator.cluster.queue.pod_warnings import FRESH_SECONDS, PAUSE_SECONDS, SLOW_SECONDS, PodWarnings
from trainium_operator.plan.model.observed import JobView, PodView
from trainium_operator.settings import Settings

CREATED = 1767225600.0
"""2026-01-01T00:00:00Z"""
MISSING = 'MountVolume.SetUp failed for volume "s" : secret "not-there" not found'


class WarningsHarness:
    def __init__(self) -> None:
        self.cluster = FakeApiServer()
        self.job_raw = self.cluster.add(JOBS, training_job("j"))
        api = Api(self.cluster)
        self.caches = make_caches(api, Settings())
        self.now = CREATED
        self.warnings = PodWarnings(api, self.caches.pods, lambda: self.now)

    def add_pod(self, ordinal: int = 0, *, init: dict[str, Any] | None = None, node: str = "n") -> None:
        waiting = {"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}
        status = {"phase": "Pending", "containerStatuses": [waiting], "initContainerStatuses": [init] if init else []}
        raw = worker_pod(
            f"j-w-{ordinal}",
            owner=owner_reference("j", self.job_raw["metadata"]["uid"]),
            node=node,
            status=status,
            uid=f"uid-{ordinal}",
            creationTimestamp="2026-01-01T00:00:00Z",
        )
        self.caches.pods.write_through(self.cluster.add(PODS, raw))

    def event(self, reason: str, message: str, stamp: str, name: str = "e") -> None:
        self.cluster.add(
            EVENTS,
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
        pods = tuple(self.caches.pods.store.list_owned_by(self.job.id).values())
        return self.warnings.add_warnings(self.job, pods)[0]


async def start_harness() -> WarningsHarness:
    harness = WarningsHarness()
    await harness.caches.jobs.refresh()
    return harness


@in_virtual_time
async def test_a_slow_pod_shows_its_mount_failure_from_events() -> None:
    harness = await start_harness()
    harness.add_pod()
    harness.event("FailedScheduling", "0/3 nodes", "2026-01-01T00:00:09Z", "older")
    harness.event("FailedMount", MISSING, "2026-01-01T00:00:08Z")
    harness.now += SLOW_SECONDS - 1
    assert (await harness.read()).reason == "ContainerCreating"
    assert harness.warnings.get_refresh_delay(harness.job) == 1.0
    assert harness.lists() == 0
    harness.now += 1
    view = await harness.read()
    assert (view.reason, view.message) == ("FailedMount", MISSING)
    assert (await harness.read()).reason == "FailedMount"
    assert harness.lists() == 1, "not at every plan"
    assert harness.warnings.get_refresh_delay(harness.job) == PAUSE_SECONDS


@in_virtual_time
async def test_a_stale_warning_is_not_shown() -> None:
    harness = await start_harness()
    harness.add_pod()
    harness.event("FailedMount", MISSING, "2026-01-01T00:00:08Z")
    harness.now += SLOW_SECONDS + FRESH_SECONDS
    assert (await harness.read()).reason == "ContainerCreating"


@pytest.mark.parametrize("case", ["no node", "an init container runs"])
@in_virtual_time
async def test_events_are_not_listed_if_the_status_names_the_problem(case: str) -> None:
    harness = await start_harness()
    if case == "no node":
        harness.add_pod(node="")
    else:
        harness.add_pod(init={"name": "fetch", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}})
    harness.now += 100
    await harness.read()
    assert harness.lists() == 0
    assert harness.warnings.get_refresh_delay(harness.job) is None


@in_virtual_time
async def test_without_permission_to_list_events_the_status_is_used() -> None:
    harness = await start_harness()
    harness.add_pod()
    harness.cluster.faults.append(
        lambda _method, path: http_error(403, "Forbidden", "no") if path.endswith("/events") else None
    )
    harness.now += SLOW_SECONDS
    assert (await harness.read()).reason == "ContainerCreating"
    assert harness.warnings.get_refresh_delay(harness.job) == PAUSE_SECONDS
