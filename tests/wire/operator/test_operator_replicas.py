"""Two replicas: hand-over by crash and by order, agents that find the new leader, fenced writes, hours alone."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.testing.api.fake_kubernetes import refuse
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.fake_workers import lose_node
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import World, world
from trainium_operator.cluster.api.resources import JOBS, LEASES, NODES
from trainium_operator.plan.model.names import JobId


def now() -> float:
    return asyncio.get_running_loop().time()


async def leads_after(seen: World, since: float, seconds: float) -> float:
    await until(lambda: seen.leader() is not None, seconds, "another operator leads")
    leader = seen.leader()
    assert leader is not None
    return leader.began_to_lead - since


def _uid_of_node(seen: World, membership: dict[str, Any]) -> str:
    uid: str = seen.cluster.get(NODES, "", membership["members"][0]["nodeName"])["metadata"]["uid"]
    return uid


def undisturbed(seen: World, pods: dict[str, str]) -> None:
    """Nobody was called lost, nothing was replaced, nothing was counted."""
    status = seen.status()
    assert status["phase"] == "Running"
    assert status["restarts"].get("total", 0) == 0
    assert status["membership"]["generation"] == 1
    assert status.get("history", []) == []
    assert seen.pods() == pods


@in_virtual_time
async def test_after_a_crash_the_other_leads_within_20_seconds_and_nobody_is_called_lost() -> None:
    async with world() as seen:
        pods, step, crashed = seen.pods(), seen.workers.step, now()
        await seen.lose_operator(seen.leader_name())
        assert await leads_after(seen, crashed, 25) <= 20
        await seen.trains(200)
        undisturbed(seen, pods)
        assert seen.workers.step > step + 200


@in_virtual_time
async def test_a_leader_that_leaves_in_order_is_followed_within_2_seconds() -> None:
    async with world() as seen:
        pods, left = seen.pods(), now()
        await seen.stop_operator(seen.leader_name())
        assert await leads_after(seen, left, 5) <= 2
        await seen.trains(100)
        undisturbed(seen, pods)


@in_virtual_time
async def test_the_new_leader_serves_the_recorded_membership_from_its_first_answer_on() -> None:
    async with world() as seen:
        lose_node(seen.workers, seen.membership()["members"][1]["nodeName"])
        await seen.trains(20)
        await seen.runs()
        assert seen.membership()["generation"] == 2
        await seen.lose_operator(seen.leader_name())
        await until(lambda: seen.leader() is not None, 25, "the other leads")
        leader = seen.leader()
        assert leader is not None
        assert leader.runtime.state.published(JobId("default", "llama", seen.job()["metadata"]["uid"])) == 2


@in_virtual_time
async def test_agents_are_answered_while_the_new_leader_still_reads_the_long_lists() -> None:
    async with world() as seen:
        pods, job = seen.pods(), JobId("default", "llama", seen.job()["metadata"]["uid"])
        name = seen.leader_name()
        other = next(each for key, each in seen.processes.items() if key != name)
        late = refuse(503, "ServiceUnavailable", "etcd is slow")
        seen.cluster.faults.append(lambda method, path: late if (method, path) == ("GET", "/api/v1/pods") else None)
        await seen.stop_operator(name)
        await until(other.runtime.serving.is_set, 3, "agents are answered")
        assert other.runtime.state.published(job) == 1
        await asyncio.sleep(3)
        assert all(agent.heartbeat is not None for agent in other.runtime.state.agents(job).values())
        assert len(other.runtime.state.agents(job)) == len(pods)
        assert not other.runtime.leading.is_set()
        seen.cluster.faults.clear()
        await until(other.runtime.leading.is_set, 3, "jobs are planned")
        await seen.trains(20)
        undisturbed(seen, pods)


@in_virtual_time
async def test_a_node_that_is_lost_together_with_the_leader_is_replaced_by_the_next_one() -> None:
    async with world() as seen:
        lost = now()
        lose_node(seen.workers, seen.membership()["members"][0]["nodeName"])
        await seen.lose_operator(seen.leader_name())
        await seen.trains(5, seconds=60)
        assert now() - lost < 45
        await seen.runs()
        assert [each["rung"] for each in seen.status()["history"]] == ["Spare"]
        assert seen.status()["restarts"]["total"] == 1


@in_virtual_time
async def test_half_an_hour_without_any_operator_is_healed_by_the_agents_and_counted_once_afterwards() -> None:
    async with world() as seen:
        pods = seen.pods()
        for name in list(seen.processes):
            await seen.lose_operator(name)
        await asyncio.sleep(600)
        seen.workers.crash_process("llama", 1)
        step = seen.workers.step
        await asyncio.sleep(1200)
        assert seen.workers.step > step + 2000
        await seen.start_operator("operator-2")
        await asyncio.sleep(60)
        await seen.start_operator("operator-3")
        await seen.lose_operator("operator-2")
        await asyncio.sleep(60)
        status = seen.status()
        assert status["phase"] == "Running"
        assert status["restarts"] == {"total": 1, "byCause": {"Crash": 1}}
        assert [(each["rung"], each["cause"], each["pod"]) for each in status["history"]] == [
            ("InPlace", "Crash", seen.membership()["members"][1]["podName"])
        ]
        assert len(status["failures"]) == 1
        membership = status["membership"]
        assert (membership["generation"], membership["attempt"], membership["size"]) == (1, 1, 2)
        assert seen.pods() == pods


@in_virtual_time
async def test_an_operator_that_is_cut_off_stops_before_the_other_begins_and_writes_nothing_afterwards() -> None:
    async with world() as seen:
        pods, name = seen.pods(), seen.leader_name()
        old, cut = seen.processes[name], now()
        seen.cut_off(name)
        await until(old.ended.is_set, 15, "the leader that cannot renew stops")
        assert seen.leader() is None
        stopped = now()
        assert await leads_after(seen, cut, 25) <= 20
        assert now() > stopped
        assert seen.leader_name() != name
        await seen.trains(100)
        undisturbed(seen, pods)
        assert seen.cluster.get(LEASES, "system", "trainium-operator")["spec"]["leaseTransitions"] == 1


@in_virtual_time
async def test_writes_of_a_leader_that_does_not_know_it_was_replaced_are_refused() -> None:
    """The worst case: no signal stopped it, its caches are old, and in the end it even believes in its Lease.

    Then what it tries first from its old copies is refused by their versions.
    """
    async with world(replicas=1) as seen:
        old = seen.processes["operator-0"]
        old._lease.cancel()
        seen.cluster.stall_streams()
        new = await seen.start_operator("operator-1")
        await until(new.runtime.leading.is_set, 25, "the other leads")
        seen.workers.operators = [new]
        lose_node(seen.workers, seen.membership()["members"][1]["nodeName"])
        await seen.trains(20)
        await seen.runs()
        before, pods = seen.membership(), seen.pods()
        written = len(old.connection.writes)
        # To it a member's node is gone, and it does what it did when it led.
        old.runtime.caches.nodes.store.forget(("", before["members"][0]["nodeName"]), _uid_of_node(seen, before))

        async def act() -> None:
            for _ in range(20):
                old.runtime.enqueue_all()
                await asyncio.sleep(1)

        await act()
        assert old.connection.writes[written:] == []  # its Lease has run out, and it looks before each write
        old.runtime.acting._may_write = lambda: True
        old.connection.die_after(1)
        await act()
        assert [(method, status) for method, _, status in old.connection.writes[written:]] == [("PATCH", 409)]
        assert seen.membership() == before
        assert seen.pods() == pods
        await seen.runs()
        assert seen.status()["restarts"]["total"] == 1


@in_virtual_time
async def test_the_operators_clock_may_jump_an_hour_either_way() -> None:
    async with world() as seen:
        pods, leader = seen.pods(), seen.leader_name()
        seen.workers.turns_per_step = 24
        await seen.trains(3)
        for error in (3600.0, -3600.0, 0.0):
            await asyncio.sleep(5)
            seen.clock_error = error
            for _ in range(10):  # some agents have sent a message since, others have not
                await asyncio.sleep(0.3)
                seen.processes[leader].runtime.enqueue_all()
            await seen.trains(5)
            assert seen.leader_name() == leader
            undisturbed(seen, pods)
            # A replica that starts by the wrong clock takes over in its turn.
            await seen.lose_operator(leader)
            await until(lambda: seen.leader() is not None, 25, "the other leads")
            await seen.start_operator(leader)
            leader = seen.leader_name()
            await seen.trains(5)
            undisturbed(seen, pods)


@in_virtual_time
async def test_a_deadline_that_was_written_by_a_fast_clock_does_not_hold_the_job_up_for_an_hour() -> None:
    async with world(replicas=1, nodes=4) as seen:
        seen.clock_error = 3600.0
        await seen.lose_operator("operator-0")
        await seen.start_operator("operator-1")
        await seen.runs()
        for rank in (0, 1):
            seen.workers.crash_process("llama", rank)
            await asyncio.sleep(5)
        lose_node(seen.workers, seen.membership()["members"][1]["nodeName"])
        await asyncio.sleep(10)
        await seen.lose_operator("operator-1")
        seen.clock_error = 0.0
        await seen.start_operator("operator-2")
        await seen.trains(10)
        await seen.runs(seconds=120)
        lose_node(seen.workers, seen.membership()["members"][0]["nodeName"])
        await asyncio.sleep(5)
        assert seen.cluster.get(JOBS, "default", "llama")["status"]["nextPodOrdinal"] > 3
