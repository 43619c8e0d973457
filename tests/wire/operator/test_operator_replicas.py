"""Two replicas: hand-over by crash and by order, agents that find the new leader, fenced writes, hours alone."""

import asyncio
from typing import Any

from tests.testing.api.fake_kubernetes import http_error
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.fake_workers import lose_node
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import OperatorDeployment, run_deployment
from trainium_operator.cluster.api.resources import JOBS, LEASES, NODES
from trainium_operator.plan.model.names import JobId


def now() -> float:
    return asyncio.get_running_loop().time()


async def leads_after(env: OperatorDeployment, since: float, seconds: float) -> float:
    await until(lambda: env.leader() is not None, seconds, "another operator leads")
    leader = env.leader()
    assert leader is not None
    return leader.began_to_lead - since


def uid_of_first_node(env: OperatorDeployment, membership: dict[str, Any]) -> str:
    uid: str = env.cluster.get(NODES, "", membership["members"][0]["nodeName"])["metadata"]["uid"]
    return uid


def assert_undisturbed(env: OperatorDeployment, pods: dict[str, str]) -> None:
    """Assert that no worker was replaced and no restart counted."""
    status = env.status()
    assert status["phase"] == "Running"
    assert status["restarts"].get("total", 0) == 0
    assert status["membership"]["generation"] == 1
    assert status.get("history", []) == []
    assert env.pods() == pods


@in_virtual_time
async def test_the_other_replica_leads_within_20_seconds_of_a_crash() -> None:
    async with run_deployment() as env:
        pods, step, crashed = env.pods(), env.workers.step, now()
        await env.kill_operator(env.leader_name())
        assert await leads_after(env, crashed, 25) <= 20
        await env.wait_for_steps(200)
        assert_undisturbed(env, pods)
        assert env.workers.step > step + 200


@in_virtual_time
async def test_a_stopped_leader_is_replaced_within_2_seconds() -> None:
    async with run_deployment() as env:
        pods, start = env.pods(), now()
        await env.stop_operator(env.leader_name())
        assert await leads_after(env, start, 5) <= 2
        await env.wait_for_steps(100)
        assert_undisturbed(env, pods)


@in_virtual_time
async def test_a_new_leader_has_the_recorded_membership() -> None:
    async with run_deployment() as env:
        lose_node(env.workers, env.membership()["members"][1]["nodeName"])
        await env.wait_for_steps(20)
        await env.wait_until_running()
        assert env.membership()["generation"] == 2
        await env.kill_operator(env.leader_name())
        await until(lambda: env.leader() is not None, 25, "the other leads")
        leader = env.leader()
        assert leader is not None
        assert leader.runtime.state.published(JobId("default", "llama", env.job()["metadata"]["uid"])) == 2


@in_virtual_time
async def test_a_new_leader_serves_agents_before_it_has_listed_pods() -> None:
    async with run_deployment() as env:
        pods, job = env.pods(), JobId("default", "llama", env.job()["metadata"]["uid"])
        name = env.leader_name()
        other = next(each for key, each in env.processes.items() if key != name)
        late = http_error(503, "ServiceUnavailable", "etcd is slow")
        env.cluster.faults.append(lambda method, path: late if (method, path) == ("GET", "/api/v1/pods") else None)
        await env.stop_operator(name)
        await until(other.runtime.serving.is_set, 3, "agents are answered")
        assert other.runtime.state.published(job) == 1
        await asyncio.sleep(3)
        assert all(agent.heartbeat is not None for agent in other.runtime.state.agents(job).values())
        assert len(other.runtime.state.agents(job)) == len(pods)
        assert not other.runtime.leading.is_set()
        env.cluster.faults.clear()
        await until(other.runtime.leading.is_set, 3, "jobs are planned")
        await env.wait_for_steps(20)
        assert_undisturbed(env, pods)


@in_virtual_time
async def test_a_node_lost_together_with_the_leader_is_replaced() -> None:
    async with run_deployment() as env:
        lost = now()
        lose_node(env.workers, env.membership()["members"][0]["nodeName"])
        await env.kill_operator(env.leader_name())
        await env.wait_for_steps(5, seconds=60)
        assert now() - lost < 45
        await env.wait_until_running()
        assert [each["rung"] for each in env.status()["history"]] == ["Spare"]
        assert env.status()["restarts"]["total"] == 1


@in_virtual_time
async def test_a_crash_without_any_operator_is_counted_once() -> None:
    async with run_deployment() as env:
        pods = env.pods()
        for name in list(env.processes):
            await env.kill_operator(name)
        await asyncio.sleep(600)
        env.workers.crash_process("llama", 1)
        step = env.workers.step
        await asyncio.sleep(1200)
        assert env.workers.step > step + 2000
        await env.start_operator("operator-2")
        await asyncio.sleep(60)
        await env.start_operator("operator-3")
        await env.kill_operator("operator-2")
        await asyncio.sleep(60)
        status = env.status()
        assert status["phase"] == "Running"
        assert status["restarts"] == {"total": 1, "byCause": {"Crash": 1}}
        assert [(each["rung"], each["cause"], each["pod"]) for each in status["history"]] == [
            ("InPlace", "Crash", env.membership()["members"][1]["podName"])
        ]
        assert len(status["failures"]) == 1
        membership = status["membership"]
        assert (membership["generation"], membership["attempt"], membership["size"]) == (1, 1, 2)
        assert env.pods() == pods


@in_virtual_time
async def test_a_partitioned_leader_stops_before_the_other_leads() -> None:
    async with run_deployment() as env:
        pods, name = env.pods(), env.leader_name()
        old, cut = env.processes[name], now()
        env.disconnect(name)
        await until(old.ended.is_set, 15, "the leader that cannot renew stops")
        assert env.leader() is None
        stopped = now()
        assert await leads_after(env, cut, 25) <= 20
        assert now() > stopped
        assert env.leader_name() != name
        await env.wait_for_steps(100)
        assert_undisturbed(env, pods)
        assert env.cluster.get(LEASES, "system", "trainium-operator")["spec"]["leaseTransitions"] == 1


@in_virtual_time
async def test_writes_of_a_replaced_leader_are_refused() -> None:
    """The worst case: no signal stopped it, its caches are old, and in the end it even believes in its Lease.

    Then what it tries first from its old copies is refused by their versions.
    """
    async with run_deployment(replicas=1) as env:
        old = env.processes["operator-0"]
        old._lease.cancel()
        env.cluster.stall_streams()
        new = await env.start_operator("operator-1")
        await until(new.runtime.leading.is_set, 25, "the other leads")
        env.workers.operators = [new]
        lose_node(env.workers, env.membership()["members"][1]["nodeName"])
        await env.wait_for_steps(20)
        await env.wait_until_running()
        before, pods = env.membership(), env.pods()
        written = len(old.connection.writes)
        # It believes that a member's node is gone, and acts as it did as leader.
        old.runtime.caches.nodes.store.forget(("", before["members"][0]["nodeName"]), uid_of_first_node(env, before))

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
        assert env.membership() == before
        assert env.pods() == pods
        await env.wait_until_running()
        assert env.status()["restarts"]["total"] == 1


@in_virtual_time
async def test_jumps_of_the_operators_clock_change_nothing() -> None:
    async with run_deployment() as env:
        pods, leader = env.pods(), env.leader_name()
        env.workers.turns_per_step = 24
        await env.wait_for_steps(3)
        for error in (3600.0, -3600.0, 0.0):
            await asyncio.sleep(5)
            env.clock_error = error
            for _ in range(10):  # some agents have sent a message since, others have not
                await asyncio.sleep(0.3)
                env.processes[leader].runtime.enqueue_all()
            await env.wait_for_steps(5)
            assert env.leader_name() == leader
            assert_undisturbed(env, pods)
            # A replica that starts by the wrong clock takes over in its turn.
            await env.kill_operator(leader)
            await until(lambda: env.leader() is not None, 25, "the other leads")
            await env.start_operator(leader)
            leader = env.leader_name()
            await env.wait_for_steps(5)
            assert_undisturbed(env, pods)


@in_virtual_time
async def test_a_deadline_from_a_fast_clock_does_not_delay_the_job() -> None:
    async with run_deployment(replicas=1, nodes=4) as env:
        env.clock_error = 3600.0
        await env.kill_operator("operator-0")
        await env.start_operator("operator-1")
        await env.wait_until_running()
        for rank in (0, 1):
            env.workers.crash_process("llama", rank)
            await asyncio.sleep(5)
        lose_node(env.workers, env.membership()["members"][1]["nodeName"])
        await asyncio.sleep(10)
        await env.kill_operator("operator-1")
        env.clock_error = 0.0
        await env.start_operator("operator-2")
        await env.wait_for_steps(10)
        await env.wait_until_running(seconds=120)
        lose_node(env.workers, env.membership()["members"][0]["nodeName"])
        await asyncio.sleep(5)
        assert env.cluster.get(JOBS, "default", "llama")["status"]["nextPodOrdinal"] > 3
