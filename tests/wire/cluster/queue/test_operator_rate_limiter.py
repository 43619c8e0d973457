"""The pause between a change of the cluster and the plan of its job, in virtual time."""

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.cache.caches import make_caches
from trainium_operator.cluster.cache.store import Entry, Key
from trainium_operator.cluster.cache.views import ChildRecord
from trainium_operator.cluster.queue.observe import enqueue_on_change
from trainium_operator.cluster.queue.work_queue import (
    MAX_BACKGROUND_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    PlanRateLimiter,
    WorkQueue,
)
from trainium_operator.plan.model.names import JobId, format_membership_name
from trainium_operator.plan.model.observed import PodPhase, PodView
from trainium_operator.settings import Settings

JOB = ("default", "llama")
POD = ("default", "llama-w-0")
OWNER = JobId(*JOB, uid="job")
MADE = PodView(name=POD[1], uid="pod", ordinal=0, phase=PodPhase.PENDING)
BOUND = replace(MADE, node="a", scheduled=True)
CREATING = replace(BOUND, reason="ContainerCreating")
RUNNING = replace(BOUND, phase=PodPhase.RUNNING, ip="10.0.0.1")


async def pause_after(*views: PodView | None, is_published: bool = False) -> float:
    """Measure the seconds until a job is planned whose pod changed from one view to the other, after a long plan."""
    loop, queue = asyncio.get_running_loop(), WorkQueue[Key]()
    caches, limiter = make_caches(cast("Api", None), Settings()), PlanRateLimiter(queue)
    if is_published:
        record = Entry(ChildRecord("hash"), uid="map", version=1, owner=OWNER)
        caches.config_maps.store.put(("default", format_membership_name("llama")), record)
    before, after = views
    if before is not None:
        caches.pods.store.put(POD, Entry(before, uid="pod", version=1, owner=OWNER))
    enqueue_on_change(caches, queue, limiter)
    limiter.record_plan(JOB, 10.0, loop.time())
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
def test_starting_pods_are_planned_with_the_long_pause_before_the_first_generation(
    before: PodView | None, after: PodView
) -> None:
    assert run_virtual(pause_after(before, after)) == pytest.approx(MAX_BACKGROUND_PAUSE_SECONDS)


@pytest.mark.parametrize(("before", "after"), [(None, MADE), (MADE, BOUND), (CREATING, RUNNING)])
def test_starting_pods_are_planned_with_the_short_pause_after_the_first_generation(
    before: PodView | None, after: PodView
) -> None:
    assert run_virtual(pause_after(before, after, is_published=True)) == pytest.approx(MAX_PAUSE_SECONDS)


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
def test_a_failed_pod_is_planned_with_the_short_pause(after: PodView | None) -> None:
    assert run_virtual(pause_after(CREATING, after)) == pytest.approx(MAX_PAUSE_SECONDS)


def test_a_changed_running_pod_is_planned_with_the_short_pause() -> None:
    assert run_virtual(pause_after(RUNNING, replace(RUNNING, ready=True))) == pytest.approx(MAX_PAUSE_SECONDS)


JOB = ("default", "llama")


OTHER = ("default", "other")


async def run_plans(cost: float, changes: list[float], until: float, faults: tuple[float, ...] = ()) -> list[float]:
    """Return the start times of plans that take `cost` seconds, for a job that changes at these times.

    With `faults`, only these are planned with the short pause.
    """
    loop, queue = asyncio.get_running_loop(), WorkQueue[Key]()
    limiter, plan_times, start = PlanRateLimiter(queue), list[float](), loop.time()

    async def work() -> None:
        while True:
            key = await queue.get()
            plan_times.append(loop.time())
            # Planning does not yield, so nothing changes during it.
            limiter.record_plan(key, cost, plan_times[-1])
            queue.mark_done(key)

    worker = asyncio.create_task(work())
    for time in sorted([*changes, *faults]):
        await asyncio.sleep(start + time - loop.time())
        limiter.put(JOB, urgent=not faults or time in faults)
    await asyncio.sleep(start + until - loop.time())
    worker.cancel()
    return [round(time - start, 3) for time in plan_times]


def test_a_change_after_an_idle_period_is_planned_at_once() -> None:
    assert run_virtual(run_plans(0.1, [1.0, 5.0], 9.0)) == [1.0, 5.0]


def test_a_burst_of_changes_takes_a_fifth_of_the_time() -> None:
    plan_times = run_virtual(run_plans(0.02, [1.0 + number / 1000 for number in range(1000)], 9.0))
    assert plan_times[0] == 1.0
    assert 12 <= len(plan_times) <= 14
    assert plan_times[-1] >= 1.999


def test_a_slow_plan_delays_the_next_by_at_most_a_second() -> None:
    plan_times = run_virtual(run_plans(3.0, [1.0, 1.1, 4.5], 20.0))
    assert plan_times[1] <= plan_times[0] + MAX_PAUSE_SECONDS


def test_changes_that_are_not_urgent_wait_longer_and_the_last_is_planned() -> None:
    calm = [1.0 + number / 1000 for number in range(5000)]
    plan_times = run_virtual(run_plans(0.02, calm, 9.0, faults=(8.0,)))
    assert plan_times[-1] == 8.0
    assert 13 <= len(plan_times) <= 16
    assert plan_times[-2] >= 5.999
    slow = run_virtual(run_plans(3.0, calm, 20.0, faults=(19.0,)))
    assert slow[:2] == [1.0, 1.0 + MAX_BACKGROUND_PAUSE_SECONDS]


def test_a_fault_does_not_wait_for_the_pause_of_changes_that_are_not_urgent() -> None:
    plan_times = run_virtual(run_plans(0.1, [1.0, 1.1], 9.0, faults=(1.5,)))
    assert plan_times == [1.0, 1.5]


@in_virtual_time
async def test_each_job_has_its_limit_until_it_is_forgotten() -> None:
    loop, queue = asyncio.get_running_loop(), WorkQueue[Key]()
    limiter, waiting = PlanRateLimiter(queue), list[bool]()
    limiter.record_plan(JOB, 0.1, loop.time() + 0.1)
    limiter.put(JOB)
    waiting.append(len(queue) == 0)
    limiter.put(OTHER)
    waiting.append(len(queue) == 1)
    limiter.forget(JOB)
    limiter.put(JOB)
    waiting.append(len(queue) == 2)
    assert waiting == [True, True, True]
