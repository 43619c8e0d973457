"""Jobs in a queue, from the first request to the end: the whole operator against an API server with a Kueue.

Each scenario is repeated once per write of the operator, killed right after it; at no moment may there be a pod without
an admission, or quota returned under a pod.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.api.fake_kubernetes import Write, refuse
from tests.testing.api.fake_kueue import FLAVOR, FakeKueue
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.operator_process import training_job, until
from tests.testing.virtual.replicas import World, check_each_death, world
from trainium_operator.cluster.api.resources import JOBS, PODS, WORKLOADS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

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
    job: dict[str, Any], capacity: int = 6, served: str = "", **options: Any
) -> AsyncIterator[tuple[World, FakeKueue]]:
    async with world(job=job, nodes=6, replicas=0, start=False, kueue=True, watch_namespaces=served) as seen:
        kueue = FakeKueue(seen.cluster, capacity)
        seen.cluster.after_write = lambda write: _never_unadmitted(seen, kueue, write)
        admitting = asyncio.create_task(kueue.run())
        try:
            await seen.start_operator("operator-0", **options)
            yield seen, kueue
            kueue.check()
        finally:
            admitting.cancel()


def _never_unadmitted(seen: World, kueue: FakeKueue, write: Write) -> None:
    """Every pod is made under an admission; quota goes back only when no pod is left of those it was for."""
    if write.status >= 400:
        return
    if write.method == "POST" and write.path.endswith("/pods") and write.body["metadata"]["name"].startswith("llama"):
        assert kueue.condition(BASE, "Admitted")
        assert write.body["spec"]["nodeSelector"]["pool"] == FLAVOR
        assert {"key": "pool", "operator": "Exists"} in write.body["spec"]["tolerations"]
    returned = (write.body or {}).get("status", {}).get("admission", write) is None
    if returned and f"/{BASE}/" in write.path:
        assert queued_pods(seen) == {}
    if BASE in kueue.workloads():  # unless somebody has just deleted it
        assert len(queued_pods(seen)) <= kueue.used(), "more pods than quota"


def queued_pods(seen: World) -> dict[str, str]:
    """Uid by name of the pods of the job with a queue."""
    return {name: uid for name, uid in seen.pods().items() if name.startswith("llama")}


async def train_to_the_end(seen: World, kueue: FakeKueue) -> None:
    await seen.runs()
    seen.workers.total_steps = seen.workers.step + 5
    await until(lambda: kueue.condition(BASE, "Finished"), 120, "its end is reported")


async def be_evicted_and_come_back(seen: World, kueue: FakeKueue) -> None:
    await seen.runs()
    kueue.capacity = 2
    kueue.evict(BASE)
    await until(lambda: not kueue.condition(BASE, "QuotaReserved"), 120, "the quota is returned")
    assert seen.status()["membership"].get("size", 0) == 0
    await until(lambda: seen.status()["phase"] == "Pending", 60, "it waits")
    kueue.capacity = 6
    await seen.trains()
    await seen.runs()


async def lose_a_step_and_get_it_back(seen: World, kueue: FakeKueue) -> None:
    await until(lambda: seen.status().get("replicas") == 3, 120, "three nodes")
    await seen.runs()
    await seen.trains()
    before = set(seen.pods().values())
    kueue.capacity = 3
    kueue.evict(STEP)
    await until(lambda: not kueue.condition(STEP, "QuotaReserved"), 240, "the step is returned")
    assert seen.status()["replicas"] == 2
    assert set(seen.pods().values()) < before, "it went on with those that it had"
    kueue.capacity = 6
    await until(lambda: seen.status().get("replicas") == 3, 240, "three nodes again")
    await seen.trains()
    await seen.runs()


async def suspend_and_resume(seen: World, kueue: FakeKueue) -> None:
    await seen.runs()
    seen.change_spec(lambda spec: spec.update(suspend=True))
    await until(
        lambda: seen.status().get("phase") == "Suspended" and not kueue.workloads(), 120, "nothing is asked for"
    )
    seen.change_spec(lambda spec: spec.update(suspend=False))
    await seen.trains()
    await seen.runs()


async def be_deleted_and_ask_again(seen: World, kueue: FakeKueue) -> None:
    """Somebody deletes the Workload of a job that runs."""
    await seen.runs()
    seen.cluster.remove(WORKLOADS, "default", BASE)
    await until(lambda: kueue.condition(BASE, "Admitted"), 120, "it has asked again")
    await seen.trains()
    await seen.runs()


SCENARIOS: dict[str, tuple[Callable[[World, FakeKueue], Awaitable[None]], dict[str, Any]]] = {
    "end": (train_to_the_end, {}),
    "eviction": (be_evicted_and_come_back, {}),
    "step": (lose_a_step_and_get_it_back, {"replicas": 3, "minReplicas": 2}),
    "suspension": (suspend_and_resume, {}),
    "deletion": (be_deleted_and_ask_again, {}),
}
EACH_CHANGE = ("end", "step")
"""The scenarios whose every write is tested with each change; the others are tested nightly."""


@cache
def run_scenario(name: str, die_after_write: int | None = None) -> tuple[dict[str, Any], int]:
    act, workers = SCENARIOS[name]

    async def scenario() -> tuple[dict[str, Any], int]:
        async with queue(queued_job(**workers), die_after_write=die_after_write) as (seen, kueue):
            first = seen.processes["operator-0"]
            await act(seen, kueue)
            await asyncio.sleep(SETTLE_SECONDS)
            status = seen.status()
            end = {
                "phase": status["phase"],
                "size": status["membership"].get("size"),
                "restarts": status.get("restarts"),
                "pods": len(seen.pods()) if status["phase"] == "Running" else None,
                "workloads": {
                    each: [kind for kind in ("Admitted", "Finished") if kueue.condition(each, kind)]
                    for each in kueue.workloads()
                },
                "used": kueue.used(),
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
def test_a_job_in_a_queue_uses_what_it_was_given_and_no_more(
    name: str, used: int, workloads: dict[str, list[str]]
) -> None:
    end, _ = run_scenario(name)
    assert (end["used"], end["workloads"]) == (used, workloads)
    assert (end["restarts"] or {}).get("total", 0) == 0, "a queue's decision is no failure"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EACH_CHANGE else pytest.mark.long) for name in SCENARIOS]
)
def test_a_queued_scenario_ends_the_same_whichever_write_the_operator_dies_after(name: str, apart: int) -> None:
    check_each_death(partial(run_scenario, name), apart)


def test_a_workload_of_somebody_else_is_left_alone_and_reported() -> None:
    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        async with world(job=queued_job(), nodes=6, replicas=0, start=False, kueue=True) as seen:
            foreign = {"metadata": {"name": BASE}, "spec": {"podSets": [], "queueName": "theirs"}}
            seen.cluster.add(WORKLOADS, foreign)
            await seen.start_operator("operator-0")
            await until(
                lambda: "exists and does not belong" in str(seen.status().get("conditions")), 60, "the condition"
            )
            assert seen.cluster.names(PODS) == []
            return seen.status(), seen.cluster.get(WORKLOADS, "default", BASE)

    status, workload = run_virtual(scenario())
    assert workload["spec"]["queueName"] == "theirs"
    assert status["phase"] == "Pending"


@in_virtual_time
async def test_without_kueue_the_other_jobs_train() -> None:
    async with world(job=queued_job(), nodes=6, replicas=0, start=False) as seen:
        seen.cluster.add(JOBS, training_job("plain", replicas=2))
        await seen.start_operator("operator-0")
        await seen.runs(job="plain")
        admitted = next(each for each in seen.status()["conditions"] if each["type"] == "Admitted")
        assert admitted["reason"] == "GangApiMissing"
        assert "set the chart's kueue.enabled" in admitted["message"]
        assert [name for name in seen.cluster.names(PODS) if name.startswith("llama")] == []


class Unreadable:
    """Workloads can be neither listed nor watched while `answer` is set."""

    def __init__(self, seen: World) -> None:
        self.answer: HttpResponse | None = None
        self._cluster = seen.cluster
        seen.cluster.faults.append(self._judge)

    def set(self, answer: HttpResponse | None) -> None:
        self.answer = answer
        self._cluster.drop_streams()

    def _judge(self, method: str, path: str) -> HttpResponse | None:
        return self.answer if method in {"GET", "WATCH"} and path.endswith("/workloads") else None


@in_virtual_time
async def test_workloads_that_cannot_be_listed_hold_up_no_new_leader_and_an_eviction_counts_once_they_can() -> None:
    async with queue(queued_job()) as (seen, kueue):
        seen.cluster.add(JOBS, training_job("plain", replicas=2))
        await seen.runs()
        await seen.start_operator("operator-1")
        await asyncio.sleep(SETTLE_SECONDS)
        before = queued_pods(seen)
        unreadable = Unreadable(seen)
        unreadable.set(refuse(500, "InternalError", "conversion webhook failed"))
        await seen.lose_operator("operator-0")
        seen.change_spec(lambda spec: spec["workers"].update(replicas=1), "plain")
        await until(lambda: seen.status("plain").get("replicas") == 1, 120, "others are planned")
        kueue.capacity = 2
        kueue.evict(BASE)
        await seen.trains(job="llama")
        assert queued_pods(seen) == before, "what is not known changes nothing"
        unreadable.set(None)
        await until(lambda: not kueue.condition(BASE, "QuotaReserved"), 120, "the quota is returned")
        kueue.capacity = 6
        await seen.runs()


@in_virtual_time
async def test_workloads_that_may_not_be_read_in_a_namespace_are_not_taken_for_none() -> None:
    async with queue(queued_job(), served="default") as (seen, kueue):
        await seen.runs()
        before = seen.pods()
        unreadable = Unreadable(seen)
        unreadable.set(refuse(403, "Forbidden", "no right to list workloads"))
        await seen.lose_operator("operator-0")
        await seen.start_operator("operator-1")
        await seen.trains(seconds=240)
        await asyncio.sleep(60)
        assert seen.pods() == before, "an absent list is no empty list"
        unreadable.set(None)
        await asyncio.sleep(60)
        assert seen.pods() == before
        kueue.capacity = 2
        kueue.evict(BASE)
        await until(lambda: not kueue.condition(BASE, "QuotaReserved"), 120, "what Kueue says counts again")
        kueue.capacity = 6
        await seen.runs()
