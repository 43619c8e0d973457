"""Jobs in a queue, from the first request to the end: the whole operator against an API server with a Kueue.

Each scenario is repeated once per write of the operator, killed right after it; at no moment may there be a pod without
an admission, or quota returned under a pod.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

import pytest

from tests.testing.api.fake_kubernetes import Write, http_error
from tests.testing.api.fake_kueue import FLAVOR, FakeKueue
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.operator_process import training_job, until
from tests.testing.virtual.replicas import OperatorDeployment, check_each_kill_point, run_deployment
from trainium_operator.cluster.api.resources import JOBS, PODS, WORKLOADS
from trainium_operator.cluster.api.transport import HttpResponse

BASE = "llama-quota-0"
STEP = "llama-quota-1"
SETTLE_SECONDS = 12.0


def queued_job(**workers: Any) -> dict[str, Any]:
    job = training_job(**{"replicas": 2, "spares": 1, **workers})
    job["spec"]["scheduling"] = {"queueName": "team"}
    return job


@asynccontextmanager
async def queue(
    job: dict[str, Any], served: str = "", **options: Any
) -> AsyncIterator[tuple[OperatorDeployment, FakeKueue]]:
    async with run_deployment(job=job, nodes=6, replicas=0, start=False, kueue=True, watch_namespaces=served) as env:
        kueue = FakeKueue(env.cluster, 6)
        env.cluster.after_write = lambda write: _assert_admitted(env, kueue, write)
        admitting = asyncio.create_task(kueue.run())
        try:
            await env.start_operator("operator-0", **options)
            yield env, kueue
            kueue.check_pod_sets()
        finally:
            admitting.cancel()


def _assert_admitted(env: OperatorDeployment, kueue: FakeKueue, write: Write) -> None:
    """Assert that each pod is created under an admission, and that quota is returned only after its pods are gone."""
    if write.status >= 400:
        return
    if write.method == "POST" and write.path.endswith("/pods") and write.body["metadata"]["name"].startswith("llama"):
        assert kueue.condition(BASE, "Admitted")
        assert write.body["spec"]["nodeSelector"]["pool"] == FLAVOR
        assert {"key": "pool", "operator": "Exists"} in write.body["spec"]["tolerations"]
    returned = (write.body or {}).get("status", {}).get("admission", write) is None
    if returned and f"/{BASE}/" in write.path:
        assert queued_pods(env) == {}
    if BASE in kueue.workloads():  # unless it was just deleted
        assert len(queued_pods(env)) <= kueue.used_quota(), "more pods than quota"


def queued_pods(env: OperatorDeployment) -> dict[str, str]:
    """Return the uid by name of the pods of the queued job."""
    return {name: uid for name, uid in env.pods().items() if name.startswith("llama")}


async def train_to_the_end(env: OperatorDeployment, kueue: FakeKueue) -> None:
    await env.wait_until_running()
    env.workers.total_steps = env.workers.step + 5
    await until(lambda: kueue.condition(BASE, "Finished"), 120, "its end is reported")


async def evict_and_readmit(env: OperatorDeployment, kueue: FakeKueue) -> None:
    await env.wait_until_running()
    kueue.capacity = 2
    kueue.evict(BASE)
    await until(lambda: not kueue.condition(BASE, "QuotaReserved"), 120, "the quota is returned")
    assert env.status()["membership"].get("size", 0) == 0
    await until(lambda: env.status()["phase"] == "Pending", 60, "it waits")
    kueue.capacity = 6
    await env.wait_for_steps()
    await env.wait_until_running()


async def lose_and_regain_a_worker(env: OperatorDeployment, kueue: FakeKueue) -> None:
    await until(lambda: env.status().get("replicas") == 3, 120, "three nodes")
    await env.wait_until_running()
    await env.wait_for_steps()
    before = set(env.pods().values())
    kueue.capacity = 3
    kueue.evict(STEP)
    await until(lambda: not kueue.condition(STEP, "QuotaReserved"), 240, "the step is returned")
    assert env.status()["replicas"] == 2
    assert set(env.pods().values()) < before, "it went on with those that it had"
    kueue.capacity = 6
    await until(lambda: env.status().get("replicas") == 3, 240, "three nodes again")
    await env.wait_for_steps()
    await env.wait_until_running()


async def suspend_and_resume(env: OperatorDeployment, kueue: FakeKueue) -> None:
    await env.wait_until_running()
    env.change_spec(lambda spec: spec.update(suspend=True))
    await until(lambda: env.status().get("phase") == "Suspended" and not kueue.workloads(), 120, "nothing is asked for")
    env.change_spec(lambda spec: spec.update(suspend=False))
    await env.wait_for_steps()
    await env.wait_until_running()


async def delete_workload(env: OperatorDeployment, kueue: FakeKueue) -> None:
    """Delete the Workload of a running job."""
    await env.wait_until_running()
    env.cluster.remove(WORKLOADS, "default", BASE)
    await until(lambda: kueue.condition(BASE, "Admitted"), 120, "it has asked again")
    await env.wait_for_steps()
    await env.wait_until_running()


SCENARIOS: dict[str, tuple[Callable[[OperatorDeployment, FakeKueue], Awaitable[None]], dict[str, Any]]] = {
    "end": (train_to_the_end, {}),
    "eviction": (evict_and_readmit, {}),
    "step": (lose_and_regain_a_worker, {"replicas": 3, "minReplicas": 2}),
    "suspension": (suspend_and_resume, {}),
    "deletion": (delete_workload, {}),
}
EACH_CHANGE = ("end", "step")
"""The scenarios whose every write is tested with each change; the others are tested nightly."""


@cache
def run_scenario(name: str, die_after_write: int | None = None) -> tuple[dict[str, Any], int]:
    act, workers = SCENARIOS[name]

    async def scenario() -> tuple[dict[str, Any], int]:
        async with queue(queued_job(**workers), die_after_write=die_after_write) as (env, kueue):
            first = env.processes["operator-0"]
            await act(env, kueue)
            await asyncio.sleep(SETTLE_SECONDS)
            status = env.status()
            end = {
                "phase": status["phase"],
                "size": status["membership"].get("size"),
                "restarts": status.get("restarts"),
                "pods": len(env.pods()) if status["phase"] == "Running" else None,
                "workloads": {
                    each: [kind for kind in ("Admitted", "Finished") if kueue.condition(each, kind)]
                    for each in kueue.workloads()
                },
                "used": kueue.used_quota(),
            }
            return end, len(first.connection.writes)

    return run_virtual(scenario())


@pytest.mark.parametrize(
    ("name", "used", "workloads"),
    [
        ("end", 0, {BASE: ["Admitted", "Finished"]}),
        ("eviction", 3, {BASE: ["Admitted"]}),
        ("step", 4, {BASE: ["Admitted"], STEP: ["Admitted"]}),
        ("suspension", 3, {BASE: ["Admitted"]}),
        ("deletion", 3, {BASE: ["Admitted"]}),
    ],
)
def test_a_queued_job_uses_exactly_its_quota(name: str, used: int, workloads: dict[str, list[str]]) -> None:
    end, _ = run_scenario(name)
    assert (end["used"], end["workloads"]) == (used, workloads)
    assert (end["restarts"] or {}).get("total", 0) == 0, "a queue's decision is no failure"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EACH_CHANGE else pytest.mark.long) for name in SCENARIOS]
)
def test_a_queued_scenario_ends_the_same_after_each_death_of_the_operator(name: str, apart: int) -> None:
    check_each_kill_point(partial(run_scenario, name), apart)


def test_a_foreign_workload_is_unchanged_and_reported() -> None:
    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        async with run_deployment(job=queued_job(), nodes=6, replicas=0, start=False, kueue=True) as env:
            foreign = {"metadata": {"name": BASE}, "spec": {"podSets": [], "queueName": "theirs"}}
            env.cluster.add(WORKLOADS, foreign)
            await env.start_operator("operator-0")
            await until(
                lambda: "exists and does not belong" in str(env.status().get("conditions")), 60, "the condition"
            )
            assert env.cluster.names(PODS) == []
            return env.status(), env.cluster.get(WORKLOADS, "default", BASE)

    status, workload = run_virtual(scenario())
    assert workload["spec"]["queueName"] == "theirs"
    assert status["phase"] == "Pending"


@in_virtual_time
async def test_jobs_without_a_queue_train_where_kueue_is_missing() -> None:
    async with run_deployment(job=queued_job(), nodes=6, replicas=0, start=False) as env:
        env.cluster.add(JOBS, training_job("plain", replicas=2))
        await env.start_operator("operator-0")
        await env.wait_until_running(job="plain")
        admitted = next(each for each in env.status()["conditions"] if each["type"] == "Admitted")
        assert admitted["reason"] == "GangApiMissing"
        assert "set the chart's kueue.enabled" in admitted["message"]
        assert [name for name in env.cluster.names(PODS) if name.startswith("llama")] == []


class Unreadable:
    """A fault: Workloads can be neither listed nor watched while `answer` is set."""

    def __init__(self, env: OperatorDeployment) -> None:
        self.answer: HttpResponse | None = None
        self._cluster = env.cluster
        env.cluster.faults.append(self._judge)

    def set(self, answer: HttpResponse | None) -> None:
        self.answer = answer
        self._cluster.drop_streams()

    def _judge(self, method: str, path: str) -> HttpResponse | None:
        return self.answer if method in {"GET", "WATCH"} and path.endswith("/workloads") else None


@in_virtual_time
async def test_a_new_leader_plans_other_jobs_while_workloads_cannot_be_listed() -> None:
    async with queue(queued_job()) as (env, kueue):
        env.cluster.add(JOBS, training_job("plain", replicas=2))
        await env.wait_until_running()
        await env.start_operator("operator-1")
        await asyncio.sleep(SETTLE_SECONDS)
        before = queued_pods(env)
        unreadable = Unreadable(env)
        unreadable.set(http_error(500, "InternalError", "conversion webhook failed"))
        await env.kill_operator("operator-0")
        env.change_spec(lambda spec: spec["workers"].update(replicas=1), "plain")
        await until(lambda: env.status("plain").get("replicas") == 1, 120, "others are planned")
        kueue.capacity = 2
        kueue.evict(BASE)
        await env.wait_for_steps(job="llama")
        assert queued_pods(env) == before, "unknown Workloads change nothing"
        unreadable.set(None)
        await until(lambda: not kueue.condition(BASE, "QuotaReserved"), 120, "the quota is returned")
        kueue.capacity = 6
        await env.wait_until_running()


@in_virtual_time
async def test_unreadable_workloads_of_a_namespace_count_as_unknown() -> None:
    async with queue(queued_job(), served="default") as (env, kueue):
        await env.wait_until_running()
        before = env.pods()
        unreadable = Unreadable(env)
        unreadable.set(http_error(403, "Forbidden", "no right to list workloads"))
        await env.kill_operator("operator-0")
        await env.start_operator("operator-1")
        await env.wait_for_steps(seconds=240)
        await asyncio.sleep(60)
        assert env.pods() == before, "an absent list is no empty list"
        unreadable.set(None)
        await asyncio.sleep(60)
        assert env.pods() == before
        kueue.capacity = 2
        kueue.evict(BASE)
        await until(lambda: not kueue.condition(BASE, "QuotaReserved"), 120, "what Kueue says counts again")
        kueue.capacity = 6
        await env.wait_until_running()
