"""Jobs that claim their devices: the whole operator against an API server with claims, repeated with it killed.

What the claim controller, the scheduler and a driver do is simulated here as they do it on a real control plane
(`tests/cluster/test_devices.py`). At no moment may there be a pod without the template that it names.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.operator_process import training_job, until
from tests.testing.virtual.replicas import World, check_each_death, world
from trainium_operator.cluster.api.resources import CLAIMS, JOBS, NODES, PODS, SLICES, TEMPLATES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.testing.api.fake_kubernetes import Write

DRIVER = "neuron.aws.com"
SETTLE_SECONDS = 12.0


def claiming_job(**workers: Any) -> dict[str, Any]:
    job = training_job(**{"replicas": 2, "spares": 1, **workers})
    job["spec"]["workers"]["accelerator"] = {"device": "cpu", "claim": {"count": 16}}
    return job


def published(node: str, effect: str = "") -> dict[str, Any]:
    devices: list[dict[str, Any]] = [{"name": f"neurondevice{at}"} for at in range(16)]
    if effect:
        devices[3]["taints"] = [{"key": "neuron.aws.com/unhealthy", "effect": effect}]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": f"{node}-neuron"},
        "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices},
    }


def taint(seen: World, node: str, effect: str) -> None:
    seen.cluster.change(SLICES, "", f"{node}-neuron", lambda raw: raw.update(spec=published(node, effect)["spec"]))


async def _allocate(seen: World) -> None:
    """Each pod that has a node has a claim for all devices of it; one that is gone has none."""
    while True:
        await asyncio.sleep(0.5)
        pods = {name: seen.cluster.get(PODS, "default", name) for name in seen.cluster.names(PODS)}
        for name in set(seen.cluster.names(CLAIMS)) - {f"{pod}-claim" for pod in pods}:
            seen.cluster.remove(CLAIMS, "default", name)
        for name, pod in pods.items():
            node = pod["spec"].get("nodeName")
            if node and f"{name}-claim" not in seen.cluster.names(CLAIMS):
                seen.cluster.add(CLAIMS, _claim(name, pod["metadata"]["uid"], node))


def _claim(pod: str, uid: str, node: str) -> dict[str, Any]:
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid, "controller": True}
    results = [{"driver": DRIVER, "pool": node, "device": f"neurondevice{at}", "request": "neuron"} for at in range(16)]
    return {
        "metadata": {"name": f"{pod}-claim", "namespace": "default", "ownerReferences": [owner]},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": uid}],
        },
    }


def _never_without_template(seen: World, write: Write) -> None:
    if write.status < 400 and write.method == "POST" and write.path.endswith("/pods"):
        (claim,) = write.body["spec"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] in seen.cluster.names(TEMPLATES)
        assert write.body["spec"]["containers"][0]["resources"]["claims"] == [{"name": "neuron"}]


@asynccontextmanager
async def devices(job: dict[str, Any], **options: Any) -> AsyncIterator[World]:
    async with world(job=job, nodes=5, replicas=0, start=False, dra=True) as seen:
        for node in seen.cluster.names(NODES, ""):
            seen.cluster.add(SLICES, published(node))
        seen.cluster.after_write = lambda write: _never_without_template(seen, write)
        allocating = asyncio.create_task(_allocate(seen))
        try:
            await seen.start_operator("operator-0", **options)
            yield seen
        finally:
            allocating.cancel()


async def hand_over_for_a_taint(seen: World) -> None:
    await seen.runs()
    member = seen.membership()["members"][1]
    taint(seen, member["nodeName"], "NoExecute")
    await until(lambda: bool(seen.status().get("history")), 120, "it is noticed")
    await seen.trains()
    await seen.runs()
    assert member["podName"] not in {each["podName"] for each in seen.membership()["members"]}


async def take_another_shape(seen: World) -> None:
    await seen.runs()
    (before,) = seen.cluster.names(TEMPLATES)
    seen.change_spec(lambda spec: spec.update(suspend=True))
    await until(lambda: seen.status().get("phase") == "Suspended", 120, "it rests")
    seen.change_spec(lambda spec: spec["workers"]["accelerator"]["claim"].update(connected=True))
    await until(lambda: before not in seen.cluster.names(TEMPLATES), 120, "the old template is removed")
    seen.change_spec(lambda spec: spec.update(suspend=False))
    await seen.trains()
    await seen.runs()


SCENARIOS: dict[str, Callable[[World], Awaitable[None]]] = {
    "taint": hand_over_for_a_taint,
    "shape": take_another_shape,
}


@cache
def run_scenario(name: str, die_after_write: int | None = None) -> tuple[dict[str, Any], int]:
    async def scenario() -> tuple[dict[str, Any], int]:
        async with devices(claiming_job(), die_after_write=die_after_write) as seen:
            first = seen.processes["operator-0"]
            await SCENARIOS[name](seen)
            await asyncio.sleep(SETTLE_SECONDS)
            status = seen.status()
            end = {
                "phase": status["phase"],
                "causes": [entry["cause"] for entry in status.get("history", ())],
                "failures": status.get("failures", []),
                "avoided": status.get("avoidedNodes", []),
                "templates": len(seen.cluster.names(TEMPLATES)),
                "pods": len(seen.pods()),
            }
            return end, len(first.connection.writes)

    return run_virtual(scenario())


@pytest.mark.parametrize(("name", "causes"), [("taint", ["DeviceTainted"]), ("shape", [])])
def test_a_job_that_claims_devices_keeps_one_template_and_blames_nobody(name: str, causes: list[str]) -> None:
    end, _ = run_scenario(name)
    assert end == {
        "phase": "Running", "causes": causes, "failures": [], "avoided": [], "templates": 1, "pods": 3,
    }  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", ["taint", pytest.param("shape", marks=pytest.mark.long)])
def test_a_scenario_of_devices_ends_the_same_whichever_write_the_operator_dies_after(name: str, apart: int) -> None:
    check_each_death(partial(run_scenario, name), apart)


@in_virtual_time
async def test_a_template_of_somebody_else_is_left_alone_and_reported() -> None:
    async with devices(claiming_job()) as seen:
        await seen.runs()
        (name,) = seen.cluster.names(TEMPLATES)
    async with world(job=claiming_job(), nodes=3, replicas=0, start=False, dra=True) as seen:
        foreign = {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": []}}}}
        seen.cluster.add(TEMPLATES, foreign)
        await seen.start_operator("operator-0")
        conditions = f"ResourceClaimTemplate {name} exists and does not belong to this job"
        await until(lambda: conditions in str(seen.status().get("conditions")), 60, "the condition")
        assert seen.cluster.names(PODS) == []
        assert seen.cluster.get(TEMPLATES, "default", name)["spec"] == foreign["spec"]


@in_virtual_time
async def test_where_devices_cannot_be_claimed_the_other_jobs_train_and_nothing_of_devices_is_read() -> None:
    async with world(job=claiming_job(), nodes=6, replicas=0, start=False) as seen:
        seen.cluster.add(JOBS, training_job("plain", replicas=2))
        process = await seen.start_operator("operator-0")
        await seen.runs(job="plain")
        conditions = str(seen.status().get("conditions"))
        assert "DeviceApiMissing" in conditions
        assert "install the chart with dra.enabled=true" in conditions
        assert {name.rpartition("-w-")[0] for name in seen.pods()} == {"plain"}
        assert not process.runtime.caches.dra.slices.synced.is_set()


@in_virtual_time
async def test_nothing_of_devices_is_read_while_no_job_claims_any() -> None:
    async with world(job=training_job("llama", replicas=2), nodes=6, replicas=0, start=False, dra=True) as seen:
        process = await seen.start_operator("operator-0")
        await seen.runs()
        assert not process.runtime.caches.dra.slices.synced.is_set()
        seen.cluster.add(JOBS, {**claiming_job(), "metadata": {"name": "claiming", "namespace": "default"}})
        await until(process.runtime.caches.dra.slices.synced.is_set, 60, "they are read now")
        await until(lambda: "claiming-w-0" in seen.pods(), 60, "and the job begins")
