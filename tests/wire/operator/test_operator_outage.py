"""An API server that is unreachable, slow, overloaded or repeats events: training continues without a loss."""

import asyncio
import random
from collections.abc import Callable

import pytest

from tests.testing.api.fake_api_server import Fault, http_error
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.fake_workers import lose_node, set_readiness
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import OperatorDeployment, run_deployment
from trainium_operator.cluster.api.resources import CONFIG_MAPS, EVENTS, JOBS, PODS
from trainium_operator.cluster.api.transport import HttpResponse

WRITES = ("POST", "PUT", "PATCH", "DELETE")


def writes_since(deployment: OperatorDeployment, start: int) -> list[str]:
    """Return the paths of the writes, except those of Leases, among the requests from number `start` on."""
    requests = deployment.cluster.requests[start:]
    return [path for method, path in requests if method in WRITES and "/leases" not in path]


async def lose_one_node(deployment: OperatorDeployment) -> None:
    lose_node(deployment.workers, deployment.membership()["members"][1]["nodeName"])
    await deployment.wait_for_steps(5, seconds=240)
    await deployment.wait_until_running(seconds=240)


async def assert_one_replacement(deployment: OperatorDeployment) -> None:
    # A deletion that was refused is tried again after a pause, while the job trains already.
    await until(lambda: len(deployment.pods()) == 3, "the lost pod is deleted, and a spare stands by", 120)
    status = deployment.status()
    assert status["restarts"]["total"] == 1
    assert [entry["response"] for entry in status["history"]] == ["Spare"]
    assert status["membership"]["generation"] == 2


@in_virtual_time
async def test_an_outage_of_ten_minutes_loses_no_step_and_no_pod() -> None:
    async with run_deployment() as deployment:
        pods, step = deployment.pods(), deployment.workers.step
        deployment.cluster.down = True
        deployment.cluster.drop_streams()
        await asyncio.sleep(600)
        assert deployment.leader() is None  # whose Lease may have been given to another
        assert deployment.workers.step >= step + 1190
        # Kubelets could not report either: the node controller has marked all nodes.
        deployment.cluster.down = False
        set_readiness(deployment.cluster, "Unknown")
        await until(lambda: deployment.leader() is not None, "an operator leads", 30)
        await asyncio.sleep(40)
        set_readiness(deployment.cluster, "True")
        await deployment.wait_for_steps(100)
        await deployment.wait_until_running()
        assert deployment.pods() == pods
        assert deployment.status()["restarts"].get("total", 0) == 0
        assert deployment.status()["membership"]["generation"] == 1
        assert len(deployment.cluster.requests) / 2 / 700 < 5.5  # a second, of each replica: all watches and the Lease


@in_virtual_time
async def test_failures_during_an_outage_are_counted_once() -> None:
    async with run_deployment() as deployment:
        deployment.cluster.down = True
        deployment.cluster.drop_streams()
        await asyncio.sleep(100)
        deployment.workers.crash_process("llama", 0)
        await asyncio.sleep(100)
        assert deployment.workers.step > 300
        deployment.workers.lost_nodes.add(deployment.membership()["members"][1]["nodeName"])
        await asyncio.sleep(400)
        deployment.cluster.down = False
        lose_node(deployment.workers, deployment.membership()["members"][1]["nodeName"])
        await deployment.wait_for_steps(10)
        await deployment.wait_until_running()
        status = deployment.status()
        assert status["restarts"]["total"] == 2
        assert sorted(entry["response"] for entry in status["history"]) == ["InPlace", "Spare"]


def create_write_faults(share: float, outcome: Callable[[], HttpResponse], seed: int) -> Fault:
    """Return a fault that makes a share of all writes fail."""
    dice = random.Random(seed)

    def fault(method: str, where: str) -> HttpResponse | None:
        if method in WRITES and "/leases" not in where and dice.random() < share:
            return outcome()
        return None

    return fault


@pytest.mark.parametrize(
    ("share", "outcome"),
    [
        (0.7, lambda: http_error(409, "Conflict", "the object has been modified")),
        (0.5, lambda: http_error(429, "TooManyRequests", retry_after="3")),
        (0.5, lambda: http_error(500, "InternalError", "etcdserver: request timed out")),
    ],
    ids=["conflicts", "too many requests", "internal errors"],
)
@in_virtual_time
async def test_many_refused_writes_only_delay_a_replacement(share: float, outcome: Callable[[], HttpResponse]) -> None:
    async with run_deployment() as deployment:
        deployment.cluster.faults.append(create_write_faults(share, outcome, seed=1))
        requests_before = len(deployment.cluster.requests)
        lose_node(deployment.workers, deployment.membership()["members"][1]["nodeName"])
        await asyncio.sleep(60)
        deployment.cluster.faults.clear()
        await deployment.wait_for_steps(5, seconds=120)
        await deployment.wait_until_running(seconds=120)
        await assert_one_replacement(deployment)
        assert len(writes_since(deployment, requests_before)) < 250


@in_virtual_time
async def test_a_replacement_completes_despite_expired_watches() -> None:
    async with run_deployment() as deployment:
        lose_node(deployment.workers, deployment.membership()["members"][1]["nodeName"])
        for _ in range(40):
            await asyncio.sleep(0.7)
            deployment.cluster.drop_streams()
            deployment.cluster.compact()
        await deployment.wait_for_steps(5)
        await deployment.wait_until_running()
        await assert_one_replacement(deployment)


@in_virtual_time
async def test_repeated_and_old_watch_events_change_nothing() -> None:
    async with run_deployment() as deployment:
        await lose_one_node(deployment)
        written = len(deployment.cluster.writes)
        for _ in range(10):
            for resource in (PODS, JOBS):
                deployment.cluster.repeat_events(resource, 30)
            await asyncio.sleep(1)
        await deployment.wait_for_steps(5)
        await assert_one_replacement(deployment)
        kinds = {write.path.rpartition("/")[2] for write in deployment.cluster.writes[written:]}
        assert kinds <= {"status", "trainium-operator", "trainium-operators"}  # progress, and the Leases


def test_slow_requests_cause_no_more_writes() -> None:
    async def scenario(latency: float) -> int:
        async with run_deployment(start=False, replicas=0) as deployment:
            deployment.latency = latency
            await deployment.start_operator("operator-0")
            await deployment.wait_until_running()
            await lose_one_node(deployment)
            await assert_one_replacement(deployment)
            leader = deployment.leader()
            assert leader is not None
            return sum("/events" not in path and "/status" not in path for _, path, _ in leader.connection.writes)

    quick = run_virtual(scenario(0.0))
    assert run_virtual(scenario(0.5)) <= quick + 3


@in_virtual_time
async def test_a_terminating_namespace_causes_few_requests() -> None:
    async with run_deployment() as deployment:
        sentence = "unable to create new content in namespace default because it is being terminated"
        deployment.cluster.faults.append(
            lambda method, path: (
                http_error(403, "Forbidden", sentence)
                if (method == "POST" and "/namespaces/default/" in path)
                or (method == "PATCH" and "/namespaces/default/" in path and "trainingjobs" not in path)
                else None
            )
        )
        requests_before = len(deployment.cluster.requests)
        # The namespace controller deletes its objects in any order, the job last.
        for name in sorted(deployment.pods()):
            deployment.cluster.remove(PODS, "default", name)
            await asyncio.sleep(5)
        for kind, name in ((CONFIG_MAPS, "llama-config"), (CONFIG_MAPS, "llama-membership")):
            deployment.cluster.remove(kind, "default", name)
            await asyncio.sleep(5)
        await asyncio.sleep(120)
        tried = writes_since(deployment, requests_before)
        refused = [path for path in tried if "/events" not in path and "/status" not in path]
        assert len(refused) < 25
        assert len(tried) < 80
        deployment.cluster.remove(JOBS, "default", "llama")
        await asyncio.sleep(5)
        requests_before = len(deployment.cluster.requests)
        await asyncio.sleep(120)
        assert [path for path in writes_since(deployment, requests_before) if "/default/" in path] == []


@in_virtual_time
async def test_100_new_jobs_run_with_a_limited_number_of_writes() -> None:
    async with run_deployment(nodes=100, replicas=1, start=False, job=training_job("job-0", replicas=1)) as deployment:
        for number in range(1, 100):
            deployment.cluster.add(JOBS, training_job(f"job-{number}", replicas=1))

        def count_running() -> int:
            return sum(deployment.status(f"job-{number}").get("phase") == "Running" for number in range(100))

        await until(lambda: count_running() == 100, "all run", 120)
        leader = deployment.leader()
        assert leader is not None
        writes = leader.connection.writes
        assert all(status < 400 for _, _, status in writes)
        assert len(writes) < 100 * 20
        events = [raw for (plural, _, _), raw in deployment.cluster.objects.items() if plural == EVENTS.plural]
        assert all(raw["type"] == "Normal" for raw in events)


@in_virtual_time
async def test_a_job_and_a_namespace_with_the_longest_names_train_and_recover() -> None:
    name = "n" * 50
    async with run_deployment(job=training_job(name, replicas=2, spares=1), start=False) as deployment:
        await deployment.wait_until_running(job=name)
        lose_node(deployment.workers, deployment.membership(name)["members"][0]["nodeName"])
        await deployment.wait_for_steps(5, job=name)
        await deployment.wait_until_running(job=name)
        for key in deployment.cluster.objects:
            assert len(key[2]) <= 253
        for pod in deployment.pods():
            assert len(pod) <= 63
