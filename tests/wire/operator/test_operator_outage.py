"""An API server that is away, slow, overloaded, forgetful or repeats itself: training goes on and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from tests.testing.api.fake_kubernetes import Fault, refuse
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.fake_workers import lose_node
from tests.testing.virtual.operator_process import training_job, until
from tests.testing.virtual.replicas import World, world
from trainium_operator.cluster.api.resources import CONFIG_MAPS, EVENTS, JOBS, PODS

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.cluster.api.transport import HttpResponse

WRITES = ("POST", "PUT", "PATCH", "DELETE")


async def a_node_is_lost_and_replaced(seen: World) -> None:
    lose_node(seen.workers, seen.membership()["members"][1]["nodeName"])
    await seen.trains(5, seconds=240)
    await seen.runs(seconds=240)


async def check_one_replacement(seen: World) -> None:
    # A deletion that was refused is tried again after a pause, while the job trains already.
    await until(lambda: len(seen.pods()) == 3, 120, "the lost pod is deleted, and a spare stands by")
    status = seen.status()
    assert status["restarts"]["total"] == 1
    assert [each["rung"] for each in status["history"]] == ["Spare"]
    assert status["membership"]["generation"] == 2


@in_virtual_time
async def test_ten_minutes_without_an_api_server_cost_no_step_no_pod_and_no_count() -> None:
    async with world() as seen:
        pods, step = seen.pods(), seen.workers.step
        seen.cluster.down = True
        seen.cluster.drop_streams()
        await asyncio.sleep(600)
        assert seen.leader() is None  # whose Lease may have been given to another
        assert seen.workers.step >= step + 1190
        # Kubelets could not report either: the node controller has marked all nodes.
        seen.cluster.down = False
        seen.mark_nodes("Unknown")
        await until(lambda: seen.leader() is not None, 30, "an operator leads")
        await asyncio.sleep(40)
        seen.mark_nodes("True")
        await seen.trains(100)
        await seen.runs()
        assert seen.pods() == pods
        assert seen.status()["restarts"].get("total", 0) == 0
        assert seen.status()["membership"]["generation"] == 1
        assert len(seen.cluster.requests) / 2 / 700 < 5  # a second, of each replica: all watches and the Lease


@in_virtual_time
async def test_a_process_that_crashes_and_a_node_that_is_lost_during_an_outage_are_healed_and_counted_once() -> None:
    async with world() as seen:
        seen.cluster.down = True
        seen.cluster.drop_streams()
        await asyncio.sleep(100)
        seen.workers.crash_process("llama", 0)
        await asyncio.sleep(100)
        assert seen.workers.step > 300
        seen.workers.lost_nodes.add(seen.membership()["members"][1]["nodeName"])
        await asyncio.sleep(400)
        seen.cluster.down = False
        lose_node(seen.workers, seen.membership()["members"][1]["nodeName"])
        await seen.trains(10)
        await seen.runs()
        status = seen.status()
        assert status["restarts"]["total"] == 2
        assert sorted(each["rung"] for each in status["history"]) == ["InPlace", "Spare"]


def storm(share: float, outcome: Callable[[], HttpResponse], seed: int) -> Fault:
    """A part of all writes fails."""
    dice = random.Random(seed)

    def fault(method: str, where: str) -> HttpResponse | None:
        if method in WRITES and "/leases" not in where and dice.random() < share:
            return outcome()
        return None

    return fault


@pytest.mark.parametrize(
    ("share", "outcome"),
    [
        (0.7, lambda: refuse(409, "Conflict", "the object has been modified")),
        (0.5, lambda: refuse(429, "TooManyRequests", retry_after="3")),
        (0.5, lambda: refuse(500, "InternalError", "etcdserver: request timed out")),
    ],
    ids=["conflicts", "too many requests", "internal errors"],
)
@in_virtual_time
async def test_a_storm_of_refusals_delays_and_changes_nothing_else(
    share: float, outcome: Callable[[], HttpResponse]
) -> None:
    async with world() as seen:
        seen.cluster.faults.append(storm(share, outcome, seed=1))
        written = len(seen.cluster.requests)
        lose_node(seen.workers, seen.membership()["members"][1]["nodeName"])
        await asyncio.sleep(60)
        seen.cluster.faults.clear()
        await seen.trains(5, seconds=120)
        await seen.runs(seconds=120)
        await check_one_replacement(seen)
        tried = [each for each in seen.cluster.requests[written:] if each[0] in WRITES and "/leases" not in each[1]]
        assert len(tried) < 250


@in_virtual_time
async def test_expired_watches_and_dropped_streams_hide_nothing() -> None:
    async with world() as seen:
        lose_node(seen.workers, seen.membership()["members"][1]["nodeName"])
        for _ in range(40):
            await asyncio.sleep(0.7)
            seen.cluster.drop_streams()
            seen.cluster.compact()
        await seen.trains(5)
        await seen.runs()
        await check_one_replacement(seen)


@in_virtual_time
async def test_events_that_come_twice_and_from_long_ago_change_nothing() -> None:
    async with world() as seen:
        await a_node_is_lost_and_replaced(seen)
        written = len(seen.cluster.writes)
        for _ in range(10):
            for resource in (PODS, JOBS):
                seen.cluster.repeat_events(resource, 30)
            await asyncio.sleep(1)
        await seen.trains(5)
        await check_one_replacement(seen)
        kinds = {write.path.rpartition("/")[2] for write in seen.cluster.writes[written:]}
        assert kinds <= {"status", "trainium-operator"}  # progress, and the Lease


def test_half_a_second_for_each_request_makes_it_slower_and_no_busier() -> None:
    async def scenario(latency: float) -> int:
        async with world(start=False, replicas=0) as seen:
            seen.latency = latency
            await seen.start_operator("operator-0")
            await seen.runs()
            await a_node_is_lost_and_replaced(seen)
            await check_one_replacement(seen)
            leader = seen.leader()
            assert leader is not None
            return sum("/events" not in path and "/status" not in path for _, path, _ in leader.connection.writes)

    quick = run_virtual(scenario(0.0))
    assert run_virtual(scenario(0.5)) <= quick + 3


@in_virtual_time
async def test_a_namespace_that_is_being_deleted_is_no_reason_to_hurry() -> None:
    async with world() as seen:
        sentence = "unable to create new content in namespace default because it is being terminated"
        seen.cluster.faults.append(
            lambda method, path: (
                refuse(403, "Forbidden", sentence)
                if (method == "POST" and "/namespaces/default/" in path)
                or (method == "PATCH" and "/namespaces/default/" in path and "trainingjobs" not in path)
                else None
            )
        )
        asked = len(seen.cluster.requests)
        # The namespace controller deletes what is in it, in any order, the job last.
        for name in sorted(seen.pods()):
            seen.cluster.remove(PODS, "default", name)
            await asyncio.sleep(5)
        for kind, name in ((CONFIG_MAPS, "llama-config"), (CONFIG_MAPS, "llama-membership")):
            seen.cluster.remove(kind, "default", name)
            await asyncio.sleep(5)
        await asyncio.sleep(120)
        tried = [each for each in seen.cluster.requests[asked:] if each[0] in WRITES and "/leases" not in each[1]]
        refused = [each for each in tried if "/events" not in each[1] and "/status" not in each[1]]
        assert len(refused) < 25
        assert len(tried) < 80
        seen.cluster.remove(JOBS, "default", "llama")
        await asyncio.sleep(5)
        asked = len(seen.cluster.requests)
        await asyncio.sleep(120)
        assert [each for each in seen.cluster.requests[asked:] if each[0] in WRITES and "/default/" in each[1]] == []


@in_virtual_time
async def test_200_jobs_at_once_all_run_with_a_bounded_number_of_writes_each() -> None:
    async with world(nodes=200, replicas=1, start=False, job=training_job("job-0", replicas=1)) as seen:
        for number in range(1, 200):
            seen.cluster.add(JOBS, training_job(f"job-{number}", replicas=1))

        def running() -> int:
            return sum(seen.status(f"job-{number}").get("phase") == "Running" for number in range(200))

        await until(lambda: running() == 200, 120, "all run")
        leader = seen.leader()
        assert leader is not None
        writes = leader.connection.writes
        assert all(status < 400 for _, _, status in writes)
        assert len(writes) < 200 * 20
        events = [raw for (plural, _, _), raw in seen.cluster.objects.items() if plural == EVENTS.plural]
        assert all(raw["type"] == "Normal" for raw in events)


@in_virtual_time
async def test_a_job_and_a_namespace_with_the_longest_names_train_and_recover() -> None:
    name = "n" * 50
    async with world(job=training_job(name, replicas=2, spares=1), start=False) as seen:
        await seen.runs(job=name)
        lose_node(seen.workers, seen.membership(name)["members"][0]["nodeName"])
        await seen.trains(5, job=name)
        await seen.runs(job=name)
        for key in seen.cluster.objects:
            assert len(key[2]) <= 253
        for pod in seen.pods():
            assert len(pod) <= 63
