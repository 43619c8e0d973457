"""Deletion of finished jobs, disruption budgets, and repair of statuses."""

import asyncio
from typing import Any

import pytest

from tests.testing.api.fake_api_server import Write, http_error
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual import replicas
from tests.testing.virtual.operator_process import until
from trainium_operator.cluster.api.resources import CONFIG_MAPS, DISRUPTION_BUDGETS, JOBS, PODS


class Scenario(replicas.Scenario):
    """One job, its workers and an operator."""

    def __init__(self, spec: dict[str, Any] | None = None) -> None:
        job = training_job(replicas=2)
        job["spec"].update(spec or {})
        super().__init__(job, total_steps=40)
        self.cluster.graceful_pods = True

    def find_writes(self, method: str, path_part: str) -> list[Write]:
        return [write for write in self.cluster.writes if method in write.method and path_part in write.path]

    async def wait_until_completed(self) -> None:
        await until(lambda: self.status().get("phase") == "Completed", "the job is completed", 240)


def list_jobs(scenario: Scenario) -> list[str]:
    return scenario.cluster.names(JOBS)


@in_virtual_time
async def test_a_job_with_a_ttl_is_deleted_with_its_objects() -> None:
    async with Scenario({"ttlSecondsAfterFinished": 60}) as scenario:
        await scenario.wait_until_completed()
        version = scenario.cluster.get(JOBS, "default", "llama")["metadata"]["resourceVersion"]
        await asyncio.sleep(50)
        assert list_jobs(scenario) == ["llama"]
        await asyncio.sleep(20)
        assert list_jobs(scenario) == []
        (write,) = scenario.find_writes("DELETE", "trainingjobs")
        assert write.body["preconditions"]["resourceVersion"] >= version
        assert write.body["preconditions"]["uid"]
        await asyncio.sleep(30)
    for resource in (PODS, CONFIG_MAPS, DISRUPTION_BUDGETS):
        assert scenario.cluster.names(resource) == []
    assert len(scenario.find_writes("DELETE", "trainingjobs")) == 1


@in_virtual_time
async def test_a_job_changed_during_its_deletion_is_kept() -> None:
    async with Scenario({"ttlSecondsAfterFinished": 60}) as scenario:
        await scenario.wait_until_completed()

        def change_during_delete(method: str, path: str) -> Any:
            if method == "DELETE" and "trainingjobs" in path:
                scenario.cluster.faults.clear()
                scenario.cluster.change(
                    JOBS, "default", "llama", lambda raw: raw["spec"].update(ttlSecondsAfterFinished=6000)
                )
                return http_error(409, "Conflict", "the ResourceVersion in the precondition does not match")
            return None

        scenario.cluster.faults.append(change_during_delete)
        await asyncio.sleep(120)
        assert list_jobs(scenario) == ["llama"]


@in_virtual_time
async def test_the_disruption_budget_is_written_once_at_the_first_step() -> None:
    storage = {"checkpoint": {"storage": {"hostPath": {"path": "/fsx"}}}}
    async with Scenario(storage) as scenario:
        await scenario.wait_for_steps()
        await until(lambda: scenario.cluster.names(DISRUPTION_BUDGETS) == ["llama"], "the budget", 30)
        budget = scenario.cluster.get(DISRUPTION_BUDGETS, "default", "llama")
        assert budget["spec"]["minAvailable"] == 1
        assert budget["apiVersion"] == "policy/v1"
        await scenario.wait_until_completed()
    assert len(scenario.find_writes("POST", "poddisruptionbudgets")) == 1
    assert scenario.find_writes("PATCH", "poddisruptionbudgets") == []


@pytest.mark.parametrize("field", ["phase", "conditions", "history"])
@in_virtual_time
async def test_an_unreadable_status_is_repaired_and_training_continues(field: str) -> None:
    async with Scenario() as scenario:
        await scenario.wait_for_steps()
        scenario.cluster.change(JOBS, "default", "llama", lambda raw: raw["status"].update({field: "nonsense"}))
        await scenario.wait_for_steps(seconds=60)
        await scenario.wait_until_completed()
        assert isinstance(scenario.status()["conditions"], list)
