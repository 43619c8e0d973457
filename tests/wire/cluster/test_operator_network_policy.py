"""The NetworkPolicy of a job: written once, and without effect on training when it is refused."""

import asyncio
from typing import Any

import pytest

from tests.testing.api.fake_api_server import Fault, http_error
from tests.testing.api.objects import training_job
from tests.testing.operator.rbac import RIGHTS, Scope
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual import replicas
from tests.testing.virtual.operator_process import OperatorProcess, until
from trainium_operator.cluster.api.resources import EVENTS, JOBS, NETWORK_POLICIES, PODS
from trainium_operator.settings import Settings

SETTINGS = Settings(job_network_policy=True, operator_labels="app=operator")
NAME = "llama-workers"


class Scenario(replicas.Scenario):
    """One job, its workers, and an operator that makes policies."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        super().__init__(training_job("llama", replicas=2), total_steps=100_000, settings=settings)

    def applied_condition(self) -> dict[str, Any]:
        return self.condition("NetworkPolicyApplied")

    def writes(self, method: str) -> int:
        policy_writes = [write for write in self.cluster.writes if NETWORK_POLICIES.plural in write.path]
        return len([write for write in policy_writes if method in write.method])

    def policies(self) -> list[str]:
        return self.cluster.names(NETWORK_POLICIES)

    async def wait_for_replacement(self) -> None:
        """Delete one worker, and wait until another one replaces it."""
        lost = self.cluster.names(PODS)[0]
        self.cluster.remove(PODS, "default", lost)
        await until(lambda: len(self.cluster.names(PODS)) == 2, "a new worker", 20)
        await self.wait_for_steps()


def create_fault(answer: Any, *, of: str = "") -> Fault:
    """Return a fault for all requests about policies, or those of one method."""
    return lambda method, path: answer if NETWORK_POLICIES.plural in path and of in method else None


@in_virtual_time
async def test_a_policy_is_written_once_after_the_first_pods() -> None:
    async with Scenario() as scenario:
        await scenario.wait_for_steps()
        policy = scenario.cluster.get(NETWORK_POLICIES, "default", NAME)
        assert policy["apiVersion"] == "networking.k8s.io/v1"
        assert policy["spec"]["ingress"][1]["from"][0]["podSelector"] == {"matchLabels": {"app": "operator"}}
        await scenario.wait_for_replacement()
        await asyncio.sleep(700)  # past a list and a resync
        assert scenario.applied_condition() == {}
        assert (scenario.writes("POST"), scenario.writes("PATCH")) == (1, 0)
        paths = [write.path for write in scenario.cluster.writes if write.method == "POST"]
        first = next(at for at, path in enumerate(paths) if path.endswith("/networkpolicies"))
        assert len([path for path in paths[:first] if path.endswith("/pods")]) == 2
        scenario.cluster.remove(JOBS, "default", "llama")
        assert scenario.policies() == []


@in_virtual_time
async def test_policies_are_neither_read_nor_written_when_disabled() -> None:
    async with Scenario(Settings()) as scenario:
        await scenario.wait_for_steps()
        assert not [path for _, path in scenario.cluster.requests if NETWORK_POLICIES.plural in path]


@in_virtual_time
async def test_a_deleted_policy_is_recreated_and_an_edited_one_is_reverted() -> None:
    async with Scenario() as scenario:
        await scenario.wait_for_steps()
        scenario.cluster.remove(NETWORK_POLICIES, "default", NAME)
        await until(lambda: scenario.policies() == [NAME], "it is back", 30)

        def edit(raw: dict[str, Any]) -> None:
            raw["metadata"]["annotations"] = {}
            raw["spec"]["ingress"] = [{}]

        scenario.cluster.change(NETWORK_POLICIES, "default", NAME, edit)
        whole = lambda: len(scenario.cluster.get(NETWORK_POLICIES, "default", NAME)["spec"]["ingress"]) == 2  # noqa: E731
        await until(whole, "it is as it was", 30)


@in_virtual_time
async def test_a_foreign_policy_is_unchanged_and_reported() -> None:
    async with Scenario() as scenario:
        mine = scenario.cluster.add(NETWORK_POLICIES, {"metadata": {"name": NAME}, "spec": {"podSelector": {}}})
        await until(lambda: scenario.applied_condition().get("reason") == "NameTaken", "the condition", 60)
        assert f"NetworkPolicy {NAME} exists and does not belong to this job" in scenario.applied_condition()["message"]
        await scenario.wait_for_replacement()
        await asyncio.sleep(600)
        assert scenario.cluster.get(NETWORK_POLICIES, "default", NAME) == mine
        assert scenario.writes("") < 12, "it is not insisted"
        scenario.cluster.remove(NETWORK_POLICIES, "default", NAME)
        await until(lambda: scenario.applied_condition().get("status") == "True", "the job has its own", 330)
        assert scenario.cluster.get(NETWORK_POLICIES, "default", NAME)["metadata"]["ownerReferences"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (create_fault(http_error(403, "Forbidden", "networkpolicies is forbidden: old role")), "old role"),
        (create_fault(http_error(403, "Forbidden", "denied by admission"), of="POST"), "denied by admission"),
        (create_fault(http_error(500, "InternalError", "failed calling webhook"), of="POST"), "failed calling webhook"),
    ],
)
@in_virtual_time
async def test_a_refused_policy_is_reported_and_the_job_trains_and_recovers(fault: Fault, words: str) -> None:
    async with Scenario() as scenario:
        scenario.cluster.faults.append(fault)
        await scenario.wait_for_steps()
        await until(lambda: scenario.applied_condition().get("status") == "False", "the condition", 60)
        assert (scenario.applied_condition()["reason"], words in scenario.applied_condition()["message"]) == (
            "WriteFailed",
            True,
        )
        events = [raw for key, raw in scenario.cluster.objects.items() if key[0] == EVENTS.plural]
        assert [words in raw["message"] for raw in events if raw["reason"] == "WriteFailed"] == [True]
        await scenario.wait_for_replacement()
        scenario.cluster.faults.clear()
        await until(lambda: scenario.applied_condition().get("status") == "True", "it is made once it may be", 400)
        assert scenario.policies() == [NAME]


@in_virtual_time
async def test_a_new_leader_writes_no_policy_again() -> None:
    async with Scenario() as scenario:
        await scenario.wait_for_steps()
        await until(lambda: scenario.policies() == [NAME], "the policy", 30)
        before = (scenario.writes("POST"), scenario.writes("PATCH"))
        await scenario.process.kill()
        scenario.process = OperatorProcess(scenario.cluster, settings=SETTINGS, identity="operator-1")
        scenario.workers.operator = scenario.process
        await scenario.process.start()
        await scenario.wait_for_steps()
        await asyncio.sleep(60)
        assert (scenario.writes("POST"), scenario.writes("PATCH")) == before


@in_virtual_time
async def test_only_the_listed_rights_to_policies_are_used() -> None:
    async with Scenario() as scenario:
        await scenario.wait_for_steps()
        scenario.cluster.remove(NETWORK_POLICIES, "default", NAME)
        await scenario.wait_for_steps()
    verbs = {"POST": "create", "PATCH": "patch", "WATCH": "watch", "GET": "get"}
    used = {verbs[method] for method, path in scenario.cluster.requests if NETWORK_POLICIES.plural in path}
    (right,) = [right for right in RIGHTS if right.scope is Scope.NETWORK_POLICIES]
    assert used <= set(right.verbs)
    assert "create" in used
