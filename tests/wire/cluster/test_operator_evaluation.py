"""Evaluation pods of milestones: the operator killed after each write, refused pods."""

import asyncio
import json
from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.testing.api.objects import end_worker, training_job
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import OperatorDeployment, check_each_kill_point, run_with_kubelet
from trainium_contract.wire.worker_env import ROLE_EVALUATION
from trainium_operator.cluster.api.resources import JOBS, PODS
from trainium_operator.plan.model.names import ANNOTATION_EVALUATES

NAME = "llama-evaluation"
STEPS = (10, 20, 30)


def job_with_milestones() -> dict[str, Any]:
    """Return a job with the models of three milestones, none of them evaluated yet."""
    raw = training_job(replicas=2)
    raw["spec"]["trainer"] |= {
        "artifacts": {"atMilestones": True, "kinds": ["Model"]},
        "evaluate": {"atMilestones": True, "tasks": {"names": ["mmlu"]}},
    }
    raw["spec"]["checkpoint"] = {"milestones": {"everyTokens": 1000}, "storage": {"uri": "s3://bucket/runs"}}
    raw["status"] = {"evaluations": [{"step": step, "path": f"s3://bucket/{step}"} for step in STEPS]}
    return raw


class Kubelet:
    """A kubelet that ends each evaluation after a while: the first pod of step 20 fails, the others have figures."""

    def __init__(self, env: OperatorDeployment) -> None:
        self.env = env
        self.ended: Counter[str] = Counter()

    async def run(self) -> None:
        cluster = self.env.cluster
        while True:
            await asyncio.sleep(3)
            raw = cluster.objects.get((PODS.plural, "default", NAME))
            if raw is None or raw["status"]["phase"] != "Running" or "deletionTimestamp" in raw["metadata"]:
                continue
            attempt = raw["metadata"]["annotations"][ANNOTATION_EVALUATES]
            self.ended[attempt] += 1
            failed = attempt == "0 s3://bucket/20"
            text = json.dumps({"evaluation": [{"name": "mmlu acc", "after": int(attempt[-2:]) / 100}]})
            cluster.change(PODS, "default", NAME, end_worker(int(failed), "Error", "Failed" if failed else "Succeeded"))
            cluster.change(PODS, "default", NAME, lambda raw: _with_message(raw, "boom" if failed else text))  # noqa: B023


def _with_message(raw: dict[str, Any], text: str) -> None:
    raw["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = text


def run_evaluations(replicas: int) -> AbstractAsyncContextManager[tuple[OperatorDeployment, Kubelet]]:
    return run_with_kubelet(Kubelet, job_with_milestones(), replicas=replicas)


def is_evaluated(env: OperatorDeployment) -> bool:
    return all(evaluation.get("figures") for evaluation in env.status()["evaluations"])


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), 4])
def test_each_model_is_measured_once_after_each_death_of_the_operator(stride: int) -> None:
    async def scenario(die_after_write: int | None) -> tuple[dict[str, Any], int]:
        async with run_evaluations(replicas=0) as (env, kubelet):
            first = await env.start_operator("operator-0", die_after_write=die_after_write)
            await until(lambda: is_evaluated(env), "all are measured", 300)
            await until(lambda: NAME not in env.cluster.names(PODS), "no pod is left", 60)
            await env.wait_until_running()
            evaluations = env.status()["evaluations"]
            end = {
                "figures": [
                    (entry["step"], entry["figures"][0]["after"], entry.get("failures", 0)) for entry in evaluations
                ],
                "ended": kubelet.ended,
                "workers": len(env.cluster.names(PODS)),
                "generation": env.status()["membership"]["generation"],
            }
            return end, len(first.connection.writes)

    end_without_kill = run_virtual(scenario(None))
    assert end_without_kill[0]["figures"] == [(10, 0.1, 0), (20, 0.2, 1), (30, 0.3, 0)]
    attempts = ("0 s3://bucket/10", "0 s3://bucket/20", "1 s3://bucket/20", "0 s3://bucket/30")
    assert end_without_kill[0]["ended"] == dict.fromkeys(attempts, 1)
    check_each_kill_point(lambda write: end_without_kill if write is None else run_virtual(scenario(write)), stride)


@in_virtual_time
async def test_a_refused_evaluation_pod_does_not_stop_training() -> None:
    async with run_evaluations(replicas=1) as (env, _):
        with env.refused_pods(ROLE_EVALUATION, "exceeded quota: evaluations"):
            await env.wait_until_running()
            killed_pod = env.cluster.names(PODS)[0]
            env.workers.kill_pod(killed_pod)
            await until(lambda: env.status().get("restarts", {}).get("total") == 1, "the loss is counted", 60)
            await env.wait_until_running()
            assert "exceeded quota: evaluations" in env.status()["evaluations"][0]["message"]
        await until(lambda: is_evaluated(env), "all are measured", 900)
        assert not env.status()["evaluations"][0].get("message")


@in_virtual_time
async def test_the_evaluation_pod_is_deleted_with_its_job() -> None:
    async with run_evaluations(replicas=1) as (env, _):
        exists = lambda: NAME in env.cluster.names(PODS)  # noqa: E731
        await until(exists, "a model is measured", 60)
        owner = env.cluster.get(PODS, "default", NAME)["metadata"]["ownerReferences"][0]
        assert owner["uid"] == env.job()["metadata"]["uid"]
        env.cluster.remove(JOBS, "default", "llama")
        await until(lambda: not exists(), "it is deleted", 60)
