"""Pods of roles at the API server: the operator killed after each write, refused pods, addresses for agents."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.testing.api.fake_api_server import http_error
from tests.testing.api.objects import end_worker, training_job
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import OperatorDeployment, check_each_kill_point, run_with_kubelet
from trainium_operator.cluster.api.resources import DISRUPTION_BUDGETS, JOBS, NETWORK_POLICIES, PODS, SERVICES
from trainium_operator.plan.model.names import JobId

ROLE = {
    "name": "rollout",
    "replicas": 2,
    "minReady": 1,
    "port": 8000,
    "template": {"spec": {"containers": [{"name": "server", "image": "vllm:1"}]}},
}


def job_with_role() -> dict[str, Any]:
    raw = training_job(replicas=2)
    del raw["spec"]["trainer"]
    return {**raw, "spec": {**raw["spec"], "program": {"image": "rl:1", "command": ["train"]}, "roles": [ROLE]}}


class Kubelet:
    """Makes the pods of roles ready, each with its own address, a while after they run."""

    def __init__(self, env: OperatorDeployment) -> None:
        self.env = env
        self.uids: dict[str, str] = {}
        """Every pod of a role that ever existed: uid by name."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(1)
            for name in self.env.role_pods("rollout"):
                raw = self.env.cluster.get(PODS, "default", name)
                assert self.uids.setdefault(name, raw["metadata"]["uid"]) == raw["metadata"]["uid"], "a name twice"
                conditions = raw["status"].get("conditions") or []
                if raw["status"].get("phase") == "Running" and not any(each["type"] == "Ready" for each in conditions):
                    self.env.cluster.change(PODS, "default", name, _make_ready)


def _make_ready(raw: dict[str, Any]) -> None:
    conditions = [*(raw["status"].get("conditions") or []), {"type": "Ready", "status": "True"}]
    raw["status"] = {**raw["status"], "podIP": f"10.9.0.{raw['metadata']['name'][-1]}", "conditions": conditions}


def run_roles(**options: Any) -> AbstractAsyncContextManager[tuple[OperatorDeployment, Kubelet]]:
    return run_with_kubelet(Kubelet, job_with_role(), **options)


def count_ready(env: OperatorDeployment) -> int:
    roles = env.status().get("roles") or [{}]
    return int(roles[0].get("readyReplicas", 0))


def served_addresses(env: OperatorDeployment) -> tuple[str, ...]:
    uid = env.cluster.get(JOBS, "default", "llama")["metadata"]["uid"]
    (process,) = [each for each in env.processes.values() if each.runtime.leading.is_set()]
    endpoints = process.runtime.state.get_endpoints(JobId("default", "llama", uid))
    return () if endpoints is None else endpoints.addresses["rollout"]


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_role_is_whole_after_each_death_of_the_operator(stride: int) -> None:
    async def scenario(die_after_write: int | None) -> tuple[dict[str, Any], int]:
        async with run_roles(replicas=0) as (env, _):
            first = await env.start_operator("operator-0", die_after_write=die_after_write)
            await env.wait_until_running()
            await until(lambda: count_ready(env) == 2, "both pods of the role are ready", 60)
            generation = env.status()["membership"]["generation"]
            env.cluster.change(PODS, "default", env.role_pods("rollout")[0], end_worker(137, "Error", "Failed"))
            await until(lambda: count_ready(env) == 1, "one pod is lost", 60)
            await until(lambda: count_ready(env) == 2, "it is replaced", 60)
            await env.wait_for_steps()
            end = {
                "pods": len(env.role_pods("rollout")),
                "addresses": len(served_addresses(env)),
                "restarts": env.status()["roles"][0]["restarts"],
                "generations": env.status()["membership"]["generation"] - generation,
                "interruptions": env.status().get("restarts", {}).get("total", 0),
                "services": env.cluster.names(SERVICES),
                "budgets": sorted(env.cluster.names(DISRUPTION_BUDGETS)),
            }
            return end, len(first.connection.writes)

    end_without_kill = run_virtual(scenario(None))
    assert end_without_kill[0] == {
        "pods": 2,
        "addresses": 2,
        "restarts": 1,
        "generations": 0,
        "interruptions": 0,
        "services": ["llama-rollout"],
        "budgets": ["llama", "llama-rollout"],
    }
    check_each_kill_point(lambda write: end_without_kill if write is None else run_virtual(scenario(write)), stride)


@in_virtual_time
async def test_refused_pods_of_a_role_do_not_stop_training_once_it_runs() -> None:
    async with run_roles(replicas=1) as (env, _):
        await env.wait_until_running()
        with env.refused_pods("rollout", "exceeded quota: pods"):
            env.cluster.remove(PODS, "default", env.role_pods("rollout")[0])
            message = lambda: env.status()["roles"][0].get("message", "")  # noqa: E731
            await until(lambda: "exceeded quota: pods" in message(), "it is reported", 60)
            env.workers.kill_pod(next(name for name in env.cluster.names(PODS) if "-w-" in name))
            await until(lambda: env.status().get("restarts", {}).get("total") == 1, "a lost worker is replaced", 60)
            await env.wait_until_running()
        await until(lambda: count_ready(env) == 2, "both pods of the role are ready", 900)
        assert not env.status()["roles"][0].get("message")


@in_virtual_time
async def test_a_suspended_job_and_one_that_has_ended_have_no_pod_of_a_role() -> None:
    async with run_roles(replicas=1) as (env, _):
        await env.wait_until_running()
        env.cluster.change(JOBS, "default", "llama", lambda raw: raw["spec"].update(suspend=True))
        await until(lambda: env.status()["phase"] == "Suspended", "it is suspended", 120)
        assert env.cluster.names(PODS) == []
        env.cluster.change(JOBS, "default", "llama", lambda raw: raw["spec"].update(suspend=False))
        await env.wait_until_running()
        await until(lambda: count_ready(env) == 2, "the role is back", 60)


@in_virtual_time
async def test_a_refused_network_policy_of_roles_is_reported_beside_that_of_the_workers() -> None:
    def refuse(method: str, path: str) -> Any:
        return (
            http_error(403, "Forbidden", "denied by admission") if method == "POST" and "/networkpol" in path else None
        )

    async with run_roles(replicas=0, job_network_policy=True, operator_labels="app=operator") as (env, _):
        env.cluster.faults.append(refuse)
        await env.start_operator("operator-0")
        await env.wait_until_running()
        await until(lambda: env.condition("Reconciled").get("status") == "False", "it is reported", 60)
        assert "NetworkPolicy llama-roles" in env.condition("Reconciled")["message"]
        assert "llama-workers" not in env.condition("Reconciled")["message"], "its condition is NetworkPolicyApplied"
        assert "denied by admission" in env.condition("NetworkPolicyApplied")["message"]
        env.cluster.faults.clear()
        await until(lambda: env.condition("Reconciled").get("status") == "True", "it is created", 400)
        assert env.cluster.names(NETWORK_POLICIES) == ["llama-roles", "llama-workers"]
