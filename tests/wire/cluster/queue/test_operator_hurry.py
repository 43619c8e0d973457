"""Which changes of the cluster have a job planned at its pace, and which may wait longer; in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from tests.testing.suite.virtual_time import run_virtual
from trainium_operator.cluster.cache.store import Entry, Key
from trainium_operator.cluster.cache.views import ChildRecord
from trainium_operator.cluster.queue.observe import enqueue_on_change
from trainium_operator.cluster.queue.pace import LONGEST_PAUSE, LONGEST_UNHURRIED_PAUSE, Pace
from trainium_operator.cluster.queue.work_queue import WorkQueue
from trainium_operator.plan.model.names import JobId, membership_name
from trainium_operator.plan.model.observed import PodPhase, PodView
from trainium_operator.runtime import make_caches
from trainium_operator.settings import Settings

if TYPE_CHECKING:
    from trainium_operator.cluster.api.client import Api

JOB = ("default", "llama")
POD = ("default", "llama-w-0")
OWNER = JobId(*JOB, uid="job")
MADE = PodView(name=POD[1], uid="pod", ordinal=0, phase=PodPhase.PENDING)
BOUND = replace(MADE, node="a", scheduled=True)
CREATING = replace(BOUND, reason="ContainerCreating")
RUNNING = replace(BOUND, phase=PodPhase.RUNNING, ip="10.0.0.1")


async def waits(*views: PodView | None, is_published: bool = False) -> float:
    """Measure the seconds until a job is planned whose pod changed from one view to the other, after a long plan."""
    loop, queue = asyncio.get_running_loop(), WorkQueue[Key]()
    caches, pace = make_caches(cast("Api", None), Settings()), Pace(queue)
    if is_published:
        record = Entry(ChildRecord("hash"), uid="map", version=1, owner=OWNER)
        caches.config_maps.store.put(("default", membership_name("llama")), record)
    before, after = views
    if before is not None:
        caches.pods.store.put(POD, Entry(before, uid="pod", version=1, owner=OWNER))
    enqueue_on_change(caches, queue, pace)
    pace.planned(JOB, 10.0, loop.time())
    start = loop.time()
    if after is None:
        caches.pods.store.remove(POD, 2)
    else:
        caches.pods.store.put(POD, Entry(after, uid="pod", version=2, owner=OWNER))
    await queue.get()
    return loop.time() - start


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, MADE),
        (MADE, BOUND),
        (BOUND, CREATING),
        (CREATING, RUNNING),
        (MADE, RUNNING),
        (None, RUNNING),
        (replace(RUNNING, ip=""), RUNNING),
    ],
)
def test_before_the_first_generation_pods_that_come_up_are_counted_without_hurry(
    before: PodView | None, after: PodView
) -> None:
    assert run_virtual(waits(before, after)) == pytest.approx(LONGEST_UNHURRIED_PAUSE)


@pytest.mark.parametrize(("before", "after"), [(None, MADE), (MADE, BOUND), (CREATING, RUNNING)])
def test_once_a_generation_was_formed_each_pod_may_be_one_that_is_waited_for(
    before: PodView | None, after: PodView
) -> None:
    assert run_virtual(waits(before, after, is_published=True)) == pytest.approx(LONGEST_PAUSE)


@pytest.mark.parametrize(
    "after",
    [
        None,
        replace(MADE, deleting=True),
        replace(MADE, disrupted=True),
        replace(MADE, unschedulable_message="0/3 nodes are available"),
        replace(CREATING, reason="ImagePullBackOff"),
        replace(BOUND, phase=PodPhase.FAILED, exit_code=1),
        replace(RUNNING, phase=PodPhase.UNKNOWN),
    ],
)
def test_what_went_wrong_with_a_pod_is_planned_at_the_job_s_pace(after: PodView | None) -> None:
    assert run_virtual(waits(CREATING, after)) == pytest.approx(LONGEST_PAUSE)


def test_a_running_pod_that_changes_is_planned_at_the_job_s_pace() -> None:
    assert run_virtual(waits(RUNNING, replace(RUNNING, ready=True))) == pytest.approx(LONGEST_PAUSE)
