"""Pods with the names of workers that are none: orphaned, or without the labels by which the operator finds them."""

import asyncio
from typing import Any

import pytest

from tests.testing.api.objects import owner_reference, training_job, worker_pod
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import Scenario
from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE
from trainium_operator.cluster.api.resources import JOBS, PODS
from trainium_operator.cluster.cache.reflector import RELIST_SECONDS
from trainium_operator.cluster.cache.views import find_stray


def worker(name: str = "llama-w-3", **metadata: Any) -> dict[str, Any]:
    return worker_pod(name, owner=owner_reference(), node="node-3", uid="p", **metadata)


@pytest.mark.parametrize(
    ("pod", "missing"),
    [
        (worker(), None),
        (worker(ownerReferences=[]), ""),
        (worker(ownerReferences=None, labels=None), None),
        (worker(labels={LABEL_ROLE: "worker"}), LABEL_JOB),
        (worker(labels={LABEL_JOB: "llama"}), LABEL_ROLE),
        (worker(labels=None), LABEL_JOB),
        (worker(name="llama-evaluation"), None),
        ({**worker(ownerReferences=[]), "status": {"phase": "Failed"}}, None),
    ],
)
def test_a_stray_pod_is_recognized_by_its_name_and_what_is_missing(pod: dict[str, Any], missing: str | None) -> None:
    stray = find_stray(pod)
    assert (None if stray is None else stray.missing_label) == missing
    assert stray is None or (stray.job, stray.name, stray.node) == ("llama", "llama-w-3", "node-3")


def message(scenario: Scenario) -> str:
    condition = scenario.condition("Reconciled")
    return condition["message"] if condition.get("reason") == "StrayPods" else ""


@in_virtual_time
async def test_orphans_of_an_earlier_job_are_named_with_their_nodes_until_they_are_deleted() -> None:
    async with Scenario(training_job(), nodes=6) as scenario:
        await scenario.wait_for_steps()
        orphans = scenario.cluster.names(PODS)
        for name in orphans:
            scenario.cluster.change(PODS, "default", name, lambda raw: raw["metadata"].pop("ownerReferences"))
        scenario.cluster.remove(JOBS, "default", "llama")
        scenario.cluster.add(JOBS, training_job())
        await until(lambda: bool(message(scenario)), "the condition", 60)
        for name in orphans:
            node = scenario.cluster.get(PODS, "default", name)["spec"]["nodeName"]
            assert (
                f"pod {name} is not a worker of this job, because no TrainingJob controls it, and keeps node {node}"
                in (message(scenario))
            )
        for name in orphans:
            scenario.cluster.remove(PODS, "default", name)
        await until(lambda: scenario.condition("Reconciled").get("status") == "True", "they are gone", 60)


@pytest.mark.parametrize("label", [LABEL_JOB, LABEL_ROLE])
@in_virtual_time
async def test_a_worker_whose_label_is_removed_is_replaced_and_named_with_its_node(label: str) -> None:
    async with Scenario(training_job(spares=1), nodes=6) as scenario:
        await scenario.wait_for_steps()
        name = scenario.cluster.names(PODS)[0]
        node = scenario.cluster.get(PODS, "default", name)["spec"]["nodeName"]
        scenario.cluster.change(PODS, "default", name, lambda raw: raw["metadata"]["labels"].pop(label))
        await until(lambda: bool(message(scenario)), "the condition", 60)
        assert f"its label {label} was removed or changed, and keeps node {node}" in message(scenario)
        await until(lambda: scenario.status()["phase"] == "Running", "another worker trains", 60)
        assert name in scenario.cluster.names(PODS), "it is left alone"
        await asyncio.sleep(120)
        assert message(scenario)
        scenario.cluster.remove(PODS, "default", name)
        await until(lambda: scenario.condition("Reconciled").get("status") == "True", "it is gone", 120)


@in_virtual_time
async def test_a_spare_whose_role_is_removed_is_named_until_it_is_deleted() -> None:
    async with Scenario(training_job(spares=1), nodes=6) as scenario:
        await scenario.wait_for_steps()
        await until(lambda: scenario.status().get("spares") == 1, "the spare is warm", 60)
        members = {member["podName"] for member in scenario.membership()["members"]}
        (spare,) = set(scenario.cluster.names(PODS)) - members
        scenario.cluster.change(PODS, "default", spare, lambda raw: raw["metadata"]["labels"].pop(LABEL_ROLE))
        await until(lambda: f"pod {spare} is not a worker" in message(scenario), "the condition", 60)
        await asyncio.sleep(1.2 * RELIST_SECONDS)
        assert message(scenario), "a list does not contain it"
        scenario.cluster.remove(PODS, "default", spare)
        await until(lambda: scenario.condition("Reconciled").get("status") == "True", "it is gone", 120)
