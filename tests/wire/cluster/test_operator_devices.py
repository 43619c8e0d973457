"""Jobs that claim devices: the whole operator against an API server with claims, also killed after each write.

What the claim controller, the scheduler and a driver do is simulated here as they do it on a real control plane
(`tests/cluster/test_devices.py`). At no moment may there be a pod without the template that it names.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

import pytest

from tests.testing.api.fake_api_server import Write
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import OperatorDeployment, check_each_kill_point, run_deployment
from trainium_operator.cluster.api.resources import CLAIMS, JOBS, NODES, PODS, SLICES, TEMPLATES

DRIVER = "neuron.aws.com"
SETTLE_SECONDS = 12.0


def claiming_job(**workers: Any) -> dict[str, Any]:
    job = training_job(**{"replicas": 2, "spares": 1, **workers})
    job["spec"]["workers"]["accelerator"] = {"device": "cpu", "claim": {"count": 16}}
    return job


def build_resource_slice(node: str, effect: str = "") -> dict[str, Any]:
    devices: list[dict[str, Any]] = [{"name": f"neurondevice{number}"} for number in range(16)]
    if effect:
        devices[3]["taints"] = [{"key": "neuron.aws.com/unhealthy", "effect": effect}]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": f"{node}-neuron"},
        "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices},
    }


def taint(env: OperatorDeployment, node: str, effect: str) -> None:
    env.cluster.change(
        SLICES, "", f"{node}-neuron", lambda raw: raw.update(spec=build_resource_slice(node, effect)["spec"])
    )


async def _allocate(env: OperatorDeployment) -> None:
    """Give each pod with a node a claim to all of its devices; delete the claims of pods that are gone."""
    while True:
        await asyncio.sleep(0.5)
        pods = {name: env.cluster.get(PODS, "default", name) for name in env.cluster.names(PODS)}
        for name in set(env.cluster.names(CLAIMS)) - {f"{pod}-claim" for pod in pods}:
            env.cluster.remove(CLAIMS, "default", name)
        for name, pod in pods.items():
            node = pod["spec"].get("nodeName")
            if node and f"{name}-claim" not in env.cluster.names(CLAIMS):
                env.cluster.add(CLAIMS, _claim(name, pod["metadata"]["uid"], node))


def _claim(pod: str, uid: str, node: str) -> dict[str, Any]:
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid, "controller": True}
    results = [
        {"driver": DRIVER, "pool": node, "device": f"neurondevice{number}", "request": "neuron"} for number in range(16)
    ]
    return {
        "metadata": {"name": f"{pod}-claim", "namespace": "default", "ownerReferences": [owner]},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": uid}],
        },
    }


def _assert_templates_exist(env: OperatorDeployment, write: Write) -> None:
    if write.status < 400 and write.method == "POST" and write.path.endswith("/pods"):
        (claim,) = write.body["spec"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] in env.cluster.names(TEMPLATES)
        assert write.body["spec"]["containers"][0]["resources"]["claims"] == [{"name": "neuron"}]


@asynccontextmanager
async def devices(job: dict[str, Any], **options: Any) -> AsyncIterator[OperatorDeployment]:
    async with run_deployment(job=job, nodes=5, replicas=0, start=False, dra=True) as env:
        for node in env.cluster.names(NODES, ""):
            env.cluster.add(SLICES, build_resource_slice(node))
        env.cluster.after_write = lambda write: _assert_templates_exist(env, write)
        allocating = asyncio.create_task(_allocate(env))
        try:
            await env.start_operator("operator-0", **options)
            yield env
        finally:
            allocating.cancel()


async def replace_tainted_devices(env: OperatorDeployment) -> None:
    await env.wait_until_running()
    member = env.membership()["members"][1]
    taint(env, member["nodeName"], "NoExecute")
    await until(lambda: bool(env.status().get("history")), "it is noticed", 120)
    await env.wait_for_steps()
    await env.wait_until_running()
    assert member["podName"] not in {member["podName"] for member in env.membership()["members"]}


async def change_shape(env: OperatorDeployment) -> None:
    await env.wait_until_running()
    (before,) = env.cluster.names(TEMPLATES)
    env.change_spec(lambda spec: spec.update(suspend=True))
    await until(lambda: env.status().get("phase") == "Suspended", "it rests", 120)
    env.change_spec(lambda spec: spec["workers"]["accelerator"]["claim"].update(connected=True))
    await until(lambda: before not in env.cluster.names(TEMPLATES), "the old template is removed", 120)
    env.change_spec(lambda spec: spec.update(suspend=False))
    await env.wait_for_steps()
    await env.wait_until_running()


SCENARIOS: dict[str, Callable[[OperatorDeployment], Awaitable[None]]] = {
    "taint": replace_tainted_devices,
    "shape": change_shape,
}


@cache
def run_scenario(name: str, die_after_write: int | None = None) -> tuple[dict[str, Any], int]:
    async def scenario() -> tuple[dict[str, Any], int]:
        async with devices(claiming_job(), die_after_write=die_after_write) as env:
            first = env.processes["operator-0"]
            await SCENARIOS[name](env)
            await asyncio.sleep(SETTLE_SECONDS)
            status = env.status()
            end = {
                "phase": status["phase"],
                "causes": [entry["cause"] for entry in status.get("history", ())],
                "failures": status.get("failures", []),
                "avoided": status.get("avoidedNodes", []),
                "templates": len(env.cluster.names(TEMPLATES)),
                "pods": len(env.pods()),
            }
            return end, len(first.connection.writes)

    return run_virtual(scenario())


@pytest.mark.parametrize(("name", "causes"), [("taint", ["DeviceTainted"]), ("shape", [])])
def test_a_job_with_claims_keeps_one_template_and_blames_no_node(name: str, causes: list[str]) -> None:
    end, _ = run_scenario(name)
    blames = {"failures": [], "avoided": []}
    assert end == {"phase": "Running", "causes": causes, **blames, "templates": 1, "pods": 3}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", ["taint", pytest.param("shape", marks=pytest.mark.long)])
def test_a_scenario_with_claims_ends_the_same_after_each_death_of_the_operator(name: str, stride: int) -> None:
    check_each_kill_point(partial(run_scenario, name), stride)


@in_virtual_time
async def test_jobs_without_claims_train_where_the_device_api_is_missing() -> None:
    async with run_deployment(job=claiming_job(), nodes=6, replicas=0, start=False) as env:
        env.cluster.add(JOBS, training_job("plain", replicas=2))
        process = await env.start_operator("operator-0")
        await env.wait_until_running(job="plain")
        conditions = str(env.status().get("conditions"))
        assert "DeviceApiMissing" in conditions
        assert "install the chart with dra.enabled=true" in conditions
        assert {name.rpartition("-w-")[0] for name in env.pods()} == {"plain"}
        assert not process.runtime.caches.dra.slices.synced.is_set()


@in_virtual_time
async def test_devices_are_read_once_a_job_claims_them() -> None:
    async with run_deployment(job=training_job("llama", replicas=2), nodes=6, replicas=0, start=False, dra=True) as env:
        process = await env.start_operator("operator-0")
        await env.wait_until_running()
        assert not process.runtime.caches.dra.slices.synced.is_set()
        env.cluster.add(JOBS, {**claiming_job(), "metadata": {"name": "claiming", "namespace": "default"}})
        await until(process.runtime.caches.dra.slices.synced.is_set, "they are read now", 60)
        await until(lambda: "claiming-w-0" in env.pods(), "and the job begins", 60)
