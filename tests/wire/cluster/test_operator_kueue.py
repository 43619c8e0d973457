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

from tests.testing.api.fake_api_server import Write, http_error
from tests.testing.api.fake_kueue import FLAVOR, FakeKueue
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.operator_process import until
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
async def run_queue(
    job: dict[str, Any], namespaces: str = "", **options: Any
) -> AsyncIterator[tuple[OperatorDeployment, FakeKueue]]:
    async with run_deployment(
        job=job, nodes=6, replicas=0, start=False, kueue=True, watch_namespaces=namespaces
    ) as deployment:
        kueue = FakeKueue(deployment.cluster, 6)
        deployment.cluster.after_write = lambda write: _assert_admitted(deployment, kueue, write)
        kueue_task = asyncio.create_task(kueue.run())
        try:
            await deployment.start_operator("operator-0", **options)
            yield deployment, kueue
            kueue.check_pod_sets()
        finally:
            kueue_task.cancel()


def _assert_admitted(deployment: OperatorDeployment, kueue: FakeKueue, write: Write) -> None:
    """Assert that each pod is created under an admission, and that quota is returned only after its pods are gone."""
    if write.status >= 400:
        return
    if write.method == "POST" and write.path.endswith("/pods") and write.body["metadata"]["name"].startswith("llama"):
        assert kueue.condition(BASE, "Admitted")
        assert write.body["spec"]["nodeSelector"]["pool"] == FLAVOR
        assert {"key": "pool", "operator": "Exists"} in write.body["spec"]["tolerations"]
    returned = (write.body or {}).get("status", {}).get("admission", write) is None
    if returned and f"/{BASE}/" in write.path:
        assert queued_pods(deployment) == {}
    if BASE in kueue.workloads():  # unless it was just deleted
        assert len(queued_pods(deployment)) <= kueue.used_quota(), "more pods than quota"


def queued_pods(deployment: OperatorDeployment) -> dict[str, str]:
    """Return the uid by name of the pods of the queued job."""
    return {name: uid for name, uid in deployment.pods().items() if name.startswith("llama")}


async def train_to_end(deployment: OperatorDeployment, kueue: FakeKueue) -> None:
    await deployment.wait_until_running()
    deployment.workers.total_steps = deployment.workers.step + 5
    await until(lambda: kueue.condition(BASE, "Finished"), "its end is reported", 120)


async def evict_and_readmit(deployment: OperatorDeployment, kueue: FakeKueue) -> None:
    await deployment.wait_until_running()
    kueue.capacity = 2
    kueue.evict(BASE)
    await until(lambda: not kueue.condition(BASE, "QuotaReserved"), "the quota is returned", 120)
    assert deployment.status()["membership"].get("size", 0) == 0
    await until(lambda: deployment.status()["phase"] == "Pending", "it waits", 60)
    kueue.capacity = 6
    await deployment.wait_for_steps()
    await deployment.wait_until_running()


async def lose_and_regain_a_worker(deployment: OperatorDeployment, kueue: FakeKueue) -> None:
    await until(lambda: deployment.status().get("replicas") == 3, "three nodes", 120)
    await deployment.wait_until_running()
    await deployment.wait_for_steps()
    before = set(deployment.pods().values())
    kueue.capacity = 3
    kueue.evict(STEP)
    await until(lambda: not kueue.condition(STEP, "QuotaReserved"), "the step is returned", 240)
    assert deployment.status()["replicas"] == 2
    assert set(deployment.pods().values()) < before, "the remaining pods are kept"
    kueue.capacity = 6
    await until(lambda: deployment.status().get("replicas") == 3, "three nodes again", 240)
    await deployment.wait_for_steps()
    await deployment.wait_until_running()


async def suspend_and_resume(deployment: OperatorDeployment, kueue: FakeKueue) -> None:
    await deployment.wait_until_running()
    deployment.change_spec(lambda spec: spec.update(suspend=True))
    await until(
        lambda: deployment.status().get("phase") == "Suspended" and not kueue.workloads(), "no Workload exists", 120
    )
    deployment.change_spec(lambda spec: spec.update(suspend=False))
    await deployment.wait_for_steps()
    await deployment.wait_until_running()


async def delete_workload(deployment: OperatorDeployment, kueue: FakeKueue) -> None:
    """Delete the Workload of a running job."""
    await deployment.wait_until_running()
    deployment.cluster.remove(WORKLOADS, "default", BASE)
    await until(lambda: kueue.condition(BASE, "Admitted"), "a new Workload is admitted", 120)
    await deployment.wait_for_steps()
    await deployment.wait_until_running()


SCENARIOS: dict[str, tuple[Callable[[OperatorDeployment, FakeKueue], Awaitable[None]], dict[str, Any]]] = {
    "end": (train_to_end, {}),
    "eviction": (evict_and_readmit, {}),
    "step": (lose_and_regain_a_worker, {"replicas": 3, "minReplicas": 2}),
    "suspension": (suspend_and_resume, {}),
    "deletion": (delete_workload, {}),
}
EACH_CHANGE = ("end", "step")
"""The scenarios whose every write is tested with each change; the others are tested nightly."""


@cache
def run_scenario(name: str, die_after_write: int | None = None) -> tuple[dict[str, Any], int]:
    run, workers = SCENARIOS[name]

    async def scenario() -> tuple[dict[str, Any], int]:
        async with run_queue(queued_job(**workers), die_after_write=die_after_write) as (deployment, kueue):
            first = deployment.processes["operator-0"]
            await run(deployment, kueue)
            await asyncio.sleep(SETTLE_SECONDS)
            status = deployment.status()
            end = {
                "phase": status["phase"],
                "size": status["membership"].get("size"),
                "restarts": status.get("restarts"),
                "pods": len(deployment.pods()) if status["phase"] == "Running" else None,
                "workloads": {
                    workload: [kind for kind in ("Admitted", "Finished") if kueue.condition(workload, kind)]
                    for workload in kueue.workloads()
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
    assert (end["restarts"] or {}).get("total", 0) == 0, "an eviction is no failure"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EACH_CHANGE else pytest.mark.long) for name in SCENARIOS]
)
def test_a_queued_scenario_ends_the_same_after_each_death_of_the_operator(name: str, every: int) -> None:
    check_each_kill_point(partial(run_scenario, name), every)


@in_virtual_time
async def test_jobs_without_a_queue_train_where_kueue_is_missing() -> None:
    async with run_deployment(job=queued_job(), nodes=6, replicas=0, start=False) as deployment:
        deployment.cluster.add(JOBS, training_job("plain", replicas=2))
        await deployment.start_operator("operator-0")
        await deployment.wait_until_running(job="plain")
        admitted = next(condition for condition in deployment.status()["conditions"] if condition["type"] == "Admitted")
        assert admitted["reason"] == "GangApiMissing"
        assert "set the chart's kueue.enabled" in admitted["message"]
        assert [name for name in deployment.cluster.names(PODS) if name.startswith("llama")] == []


class UnreadableWorkloads:
    """A fault: Workloads can be neither listed nor watched while `answer` is set."""

    def __init__(self, deployment: OperatorDeployment) -> None:
        self.answer: HttpResponse | None = None
        self._cluster = deployment.cluster
        deployment.cluster.faults.append(self._answer_request)

    def set(self, answer: HttpResponse | None) -> None:
        self.answer = answer
        self._cluster.drop_streams()

    def _answer_request(self, method: str, path: str) -> HttpResponse | None:
        return self.answer if method in {"GET", "WATCH"} and path.endswith("/workloads") else None


@in_virtual_time
async def test_a_new_leader_plans_other_jobs_while_workloads_cannot_be_listed() -> None:
    async with run_queue(queued_job()) as (deployment, kueue):
        deployment.cluster.add(JOBS, training_job("plain", replicas=2))
        await deployment.wait_until_running()
        await deployment.start_operator("operator-1")
        await asyncio.sleep(SETTLE_SECONDS)
        before = queued_pods(deployment)
        unreadable = UnreadableWorkloads(deployment)
        unreadable.set(http_error(500, "InternalError", "conversion webhook failed"))
        await deployment.kill_operator("operator-0")
        deployment.change_spec(lambda spec: spec["workers"].update(replicas=1), "plain")
        await until(lambda: deployment.status("plain").get("replicas") == 1, "others are planned", 120)
        kueue.capacity = 2
        kueue.evict(BASE)
        await deployment.wait_for_steps(job="llama")
        assert queued_pods(deployment) == before, "unknown Workloads change nothing"
        unreadable.set(None)
        await until(lambda: not kueue.condition(BASE, "QuotaReserved"), "the quota is returned", 120)
        kueue.capacity = 6
        await deployment.wait_until_running()


@in_virtual_time
async def test_unreadable_workloads_of_a_namespace_count_as_unknown() -> None:
    async with run_queue(queued_job(), namespaces="default") as (deployment, kueue):
        await deployment.wait_until_running()
        before = deployment.pods()
        unreadable = UnreadableWorkloads(deployment)
        unreadable.set(http_error(403, "Forbidden", "no right to list workloads"))
        await deployment.kill_operator("operator-0")
        await deployment.start_operator("operator-1")
        await deployment.wait_for_steps(seconds=240)
        await asyncio.sleep(60)
        assert deployment.pods() == before, "an unknown list is not an empty list"
        unreadable.set(None)
        await asyncio.sleep(60)
        assert deployment.pods() == before
        kueue.capacity = 2
        kueue.evict(BASE)
        await until(lambda: not kueue.condition(BASE, "QuotaReserved"), "the eviction is applied", 120)
        kueue.capacity = 6
        await deployment.wait_until_running()
