"""The pod that measures models of milestones, from the operator to the API server: killed after each write, refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.testing.api.fake_kubernetes import refuse
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.fake_workers import ended
from tests.testing.virtual.operator_process import training_job, until
from tests.testing.virtual.replicas import World, check_each_death, world
from trainium_contract.wire.worker_env import LABEL_ROLE, ROLE_EVALUATION
from trainium_operator.cluster.api.resources import JOBS, PODS
from trainium_operator.plan.model.names import ANNOTATION_EVALUATES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAME = "llama-evaluation"
STEPS = (10, 20, 30)


def measured_job() -> dict[str, Any]:
    """A job with the models of three milestones, none of them measured yet."""
    raw = training_job(replicas=2)
    raw["spec"]["trainer"] |= {
        "artifacts": {"atMilestones": True, "kinds": ["Model"]},
        "evaluate": {"atMilestones": True, "tasks": {"names": ["mmlu"]}},
    }
    raw["spec"]["checkpoint"] = {"milestones": {"everyTokens": 1000}, "storage": {"uri": "s3://bucket/runs"}}
    raw["status"] = {"evaluations": [{"step": step, "path": f"s3://bucket/{step}"} for step in STEPS]}
    return raw


class Kubelet:
    """Ends each evaluation after a while: the first pod of step 20 fails, the others have figures."""

    def __init__(self, seen: World) -> None:
        self.seen = seen
        self.ended: Counter[str] = Counter()

    async def run(self) -> None:
        cluster = self.seen.cluster
        while True:
            await asyncio.sleep(3)
            raw = cluster.objects.get((PODS.plural, "default", NAME))
            if raw is None or raw["status"]["phase"] != "Running" or "deletionTimestamp" in raw["metadata"]:
                continue
            attempt = raw["metadata"]["annotations"][ANNOTATION_EVALUATES]
            self.ended[attempt] += 1
            failed = attempt == "0 s3://bucket/20"
            text = json.dumps({"evaluation": [{"name": "mmlu acc", "after": int(attempt[-2:]) / 100}]})
            cluster.change(PODS, "default", NAME, ended(int(failed), "Error", "Failed" if failed else "Succeeded"))
            cluster.change(PODS, "default", NAME, lambda raw: _with_message(raw, "boom" if failed else text))  # noqa: B023


def _with_message(raw: dict[str, Any], text: str) -> None:
    raw["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = text


@contextlib.asynccontextmanager
async def measuring(**options: Any) -> AsyncIterator[tuple[World, Kubelet]]:
    async with world(job=measured_job(), start=False, **options) as seen:
        kubelet = Kubelet(seen)
        task = asyncio.create_task(kubelet.run())
        try:
            yield seen, kubelet
        finally:
            task.cancel()


def is_measured(seen: World) -> bool:
    return all(each.get("figures") for each in seen.status()["evaluations"])


def test_each_model_is_measured_once_whichever_write_the_operator_dies_after() -> None:
    async def scenario(die_after_write: int | None) -> tuple[dict[str, Any], int]:
        async with measuring(replicas=0) as (seen, kubelet):
            first = await seen.start_operator("operator-0", die_after_write=die_after_write)
            await until(lambda: is_measured(seen), 300, "all are measured")
            await until(lambda: NAME not in seen.cluster.names(PODS), 60, "no pod is left")
            await seen.runs()
            found = seen.status()["evaluations"]
            end = {
                "figures": [(each["step"], each["figures"][0]["after"], each.get("failures", 0)) for each in found],
                "ended": kubelet.ended,
                "workers": len(seen.cluster.names(PODS)),
                "generation": seen.status()["membership"]["generation"],
            }
            return end, len(first.connection.writes)

    undisturbed = run_virtual(scenario(None))
    assert undisturbed[0]["figures"] == [(10, 0.1, 0), (20, 0.2, 1), (30, 0.3, 0)]
    attempts = ("0 s3://bucket/10", "0 s3://bucket/20", "1 s3://bucket/20", "0 s3://bucket/30")
    assert undisturbed[0]["ended"] == dict.fromkeys(attempts, 1)
    check_each_death(lambda write: undisturbed if write is None else run_virtual(scenario(write)), 2)


@in_virtual_time
async def test_a_refused_pod_stops_nothing_else_and_is_created_when_it_may_be() -> None:
    async with measuring(replicas=1) as (seen, _):
        create = seen.cluster._create
        denied = refuse(403, "Forbidden", "exceeded quota: evaluations")
        forbids = True

        def created(resource: Any, namespace: str, body: dict[str, Any]) -> Any:
            evaluates = body.get("metadata", {}).get("labels", {}).get(LABEL_ROLE) == ROLE_EVALUATION
            return denied if forbids and evaluates else create(resource, namespace, body)

        seen.cluster._create = created  # type: ignore[method-assign]
        await seen.runs()
        lost = seen.cluster.names(PODS)[0]
        seen.workers.kill_pod(lost)
        await until(lambda: seen.status().get("restarts", {}).get("total") == 1, 60, "the loss is counted")
        await seen.runs()
        assert "exceeded quota: evaluations" in seen.status()["evaluations"][0]["message"]
        forbids = False
        await until(lambda: is_measured(seen), 900, "all are measured")
        assert not seen.status()["evaluations"][0].get("message")


@in_virtual_time
async def test_another_s_pod_of_that_name_is_left_alone_and_reported() -> None:
    async with measuring(replicas=0) as (seen, _):
        mine = seen.cluster.add(
            PODS, {"metadata": {"name": NAME, "labels": {}}, "spec": {}, "status": {"phase": "Running"}}
        )
        await seen.start_operator("operator-0")
        await seen.runs()
        await seen.trains()
        assert f"Pod {NAME} exists and does not belong to this job" in seen.status()["evaluations"][0]["message"]
        assert seen.cluster.get(PODS, "default", NAME)["metadata"]["uid"] == mine["metadata"]["uid"]


@in_virtual_time
async def test_the_pod_goes_with_its_job() -> None:
    async with measuring(replicas=1) as (seen, _):
        there = lambda: NAME in seen.cluster.names(PODS)  # noqa: E731
        await until(there, 60, "a model is measured")
        owner = seen.cluster.get(PODS, "default", NAME)["metadata"]["ownerReferences"][0]
        assert owner["uid"] == seen.job()["metadata"]["uid"]
        seen.cluster.remove(JOBS, "default", "llama")
        await until(lambda: not there(), 60, "it is deleted")
