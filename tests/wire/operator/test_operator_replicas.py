"""Two replicas: hand-over by crash and by order, agents that find the new leader, fenced writes, hours alone."""

import asyncio
from typing import Any

from tests.testing.api.fake_api_server import http_error
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.fake_workers import lose_node
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import OperatorDeployment, run_deployment
from trainium_operator.cluster.api.resources import LEASES, NODES
from trainium_operator.plan.model.names import JobId


def now() -> float:
    return asyncio.get_running_loop().time()


async def leads_after(deployment: OperatorDeployment, since: float, seconds: float) -> float:
    await until(lambda: deployment.leader() is not None, "another operator leads", seconds)
    leader = deployment.leader()
    assert leader is not None
    return leader.began_to_lead - since


def uid_of_first_node(deployment: OperatorDeployment, membership: dict[str, Any]) -> str:
    uid: str = deployment.cluster.get(NODES, "", membership["members"][0]["nodeName"])["metadata"]["uid"]
    return uid


def assert_undisturbed(deployment: OperatorDeployment, pods: dict[str, str]) -> None:
    """Assert that no worker was replaced and no restart counted."""
    status = deployment.status()
    assert status["phase"] == "Running"
    assert status["restarts"].get("total", 0) == 0
    assert status["membership"]["generation"] == 1
    assert status.get("history", []) == []
    assert deployment.pods() == pods


@in_virtual_time
async def test_the_other_replica_leads_within_20_seconds_of_a_crash() -> None:
    async with run_deployment() as deployment:
        pods, step, crashed = deployment.pods(), deployment.workers.step, now()
        await deployment.kill_operator(deployment.leader_name())
        assert await leads_after(deployment, crashed, 25) <= 20
        await deployment.wait_for_steps(200)
        assert_undisturbed(deployment, pods)
        assert deployment.workers.step > step + 200


@in_virtual_time
async def test_a_stopped_leader_is_replaced_within_2_seconds() -> None:
    async with run_deployment() as deployment:
        pods, start = deployment.pods(), now()
        await deployment.stop_operator(deployment.leader_name())
        assert await leads_after(deployment, start, 5) <= 2
        await deployment.wait_for_steps(100)
        assert_undisturbed(deployment, pods)


@in_virtual_time
async def test_a_new_leader_has_the_recorded_membership() -> None:
    async with run_deployment() as deployment:
        lose_node(deployment.workers, deployment.membership()["members"][1]["nodeName"])
        await deployment.wait_for_steps(20)
        await deployment.wait_until_running()
        assert deployment.membership()["generation"] == 2
        await deployment.kill_operator(deployment.leader_name())
        await until(lambda: deployment.leader() is not None, "the other leads", 25)
        leader = deployment.leader()
        assert leader is not None
        assert (
            leader.runtime.state.get_published_generation(
                JobId("default", "llama", deployment.job()["metadata"]["uid"])
            )
            == 2
        )


@in_virtual_time
async def test_a_new_leader_serves_agents_before_it_has_listed_pods() -> None:
    async with run_deployment() as deployment:
        pods, job = deployment.pods(), JobId("default", "llama", deployment.job()["metadata"]["uid"])
        name = deployment.leader_name()
        other = next(process for key, process in deployment.processes.items() if key != name)
        late = http_error(503, "ServiceUnavailable", "etcd is slow")
        deployment.cluster.faults.append(
            lambda method, path: late if (method, path) == ("GET", "/api/v1/pods") else None
        )
        await deployment.stop_operator(name)
        await until(other.runtime.serving.is_set, "agents are answered", 3)
        assert other.runtime.state.get_published_generation(job) == 1
        await asyncio.sleep(3)
        assert all(agent.heartbeat is not None for agent in other.runtime.state.list_agents(job).values())
        assert len(other.runtime.state.list_agents(job)) == len(pods)
        assert not other.runtime.leading.is_set()
        deployment.cluster.faults.clear()
        await until(other.runtime.leading.is_set, "jobs are planned", 3)
        await deployment.wait_for_steps(20)
        assert_undisturbed(deployment, pods)


@in_virtual_time
async def test_a_node_lost_together_with_the_leader_is_replaced() -> None:
    async with run_deployment() as deployment:
        lost = now()
        lose_node(deployment.workers, deployment.membership()["members"][0]["nodeName"])
        await deployment.kill_operator(deployment.leader_name())
        await deployment.wait_for_steps(5, seconds=60)
        assert now() - lost < 45
        await deployment.wait_until_running()
        assert [entry["response"] for entry in deployment.status()["history"]] == ["Spare"]
        assert deployment.status()["restarts"]["total"] == 1


@in_virtual_time
async def test_a_crash_without_any_operator_is_counted_once() -> None:
    async with run_deployment() as deployment:
        pods = deployment.pods()
        for name in list(deployment.processes):
            await deployment.kill_operator(name)
        await asyncio.sleep(600)
        deployment.workers.crash_process("llama", 1)
        step = deployment.workers.step
        await asyncio.sleep(1200)
        assert deployment.workers.step > step + 2000
        await deployment.start_operator("operator-2")
        await asyncio.sleep(60)
        await deployment.start_operator("operator-3")
        await deployment.kill_operator("operator-2")
        await asyncio.sleep(60)
        status = deployment.status()
        assert status["phase"] == "Running"
        assert status["restarts"] == {"total": 1, "byCause": {"Crash": 1}}
        assert [(entry["response"], entry["cause"], entry["pod"]) for entry in status["history"]] == [
            ("InPlace", "Crash", deployment.membership()["members"][1]["podName"])
        ]
        assert len(status["failures"]) == 1
        membership = status["membership"]
        assert (membership["generation"], membership["attempt"], membership["size"]) == (1, 1, 2)
        assert deployment.pods() == pods


@in_virtual_time
async def test_a_partitioned_leader_stops_before_the_other_leads() -> None:
    async with run_deployment() as deployment:
        pods, name = deployment.pods(), deployment.leader_name()
        old, cut = deployment.processes[name], now()
        deployment.disconnect(name)
        await until(old.ended.is_set, "the leader that cannot renew stops", 15)
        assert deployment.leader() is None
        stopped = now()
        assert await leads_after(deployment, cut, 25) <= 20
        assert now() > stopped
        assert deployment.leader_name() != name
        await deployment.wait_for_steps(100)
        assert_undisturbed(deployment, pods)
        assert deployment.cluster.get(LEASES, "system", "trainium-operator")["spec"]["leaseTransitions"] == 1


@in_virtual_time
async def test_writes_of_a_replaced_leader_are_refused() -> None:
    """The worst case: no signal stopped it, its caches are old, and in the end it even believes in its Lease.

    Then what it tries first from its old copies is refused by their versions.
    """
    async with run_deployment(replicas=1) as deployment:
        old = deployment.processes["operator-0"]
        old._lease.cancel()
        deployment.cluster.stall_streams()
        new = await deployment.start_operator("operator-1")
        await until(new.runtime.leading.is_set, "the other leads", 25)
        deployment.workers.operators = [new]
        lose_node(deployment.workers, deployment.membership()["members"][1]["nodeName"])
        await deployment.wait_for_steps(20)
        await deployment.wait_until_running()
        before, pods = deployment.membership(), deployment.pods()
        written = len(old.connection.writes)
        # It believes that a member's node is gone, and acts as it did as leader.
        old.runtime.caches.nodes.store.forget(
            ("", before["members"][0]["nodeName"]), uid_of_first_node(deployment, before)
        )

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
        assert deployment.membership() == before
        assert deployment.pods() == pods
        await deployment.wait_until_running()
        assert deployment.status()["restarts"]["total"] == 1


@in_virtual_time
async def test_jumps_of_the_operators_clock_change_nothing() -> None:
    async with run_deployment() as deployment:
        pods, leader = deployment.pods(), deployment.leader_name()
        deployment.workers.turns_per_step = 24
        await deployment.wait_for_steps(3)
        for error in (3600.0, -3600.0, 0.0):
            await asyncio.sleep(5)
            deployment.clock_error = error
            for _ in range(10):  # some agents have sent a message since, others have not
                await asyncio.sleep(0.3)
                deployment.processes[leader].runtime.enqueue_all()
            await deployment.wait_for_steps(5)
            assert deployment.leader_name() == leader
            assert_undisturbed(deployment, pods)
            # A replica that starts by the wrong clock takes over in its turn.
            await deployment.kill_operator(leader)
            await until(lambda: deployment.leader() is not None, "the other leads", 25)
            await deployment.start_operator(leader)
            leader = deployment.leader_name()
            await deployment.wait_for_steps(5)
            assert_undisturbed(deployment, pods)


@in_virtual_time
async def test_a_deadline_from_a_fast_clock_does_not_delay_the_job() -> None:
    async with run_deployment(replicas=1, nodes=4) as deployment:
        deployment.clock_error = 3600.0
        await deployment.kill_operator("operator-0")
        await deployment.start_operator("operator-1")
        await deployment.wait_until_running()
        for rank in (0, 1):
            deployment.workers.crash_process("llama", rank)
            await asyncio.sleep(5)
        lose_node(deployment.workers, deployment.membership()["members"][1]["nodeName"])
        await asyncio.sleep(10)
        await deployment.kill_operator("operator-1")
        deployment.clock_error = 0.0
        await deployment.start_operator("operator-2")
        await deployment.wait_for_steps(10)
        await deployment.wait_until_running(seconds=120)
        lose_node(deployment.workers, deployment.membership()["members"][0]["nodeName"])
        await asyncio.sleep(5)
        assert deployment.status()["nextPodOrdinal"] > 3
