"""The NetworkPolicy of a job, from the operator to the API server: one write, and no obstacle to anything else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.api.fake_kubernetes import FakeCluster, Fault, refuse
from tests.testing.operator.rbac import RIGHTS, Scope
from tests.testing.suite.virtual_time import run_virtual
from tests.testing.virtual.fake_workers import Workers
from tests.testing.virtual.operator_process import OperatorProcess, training_job, until, wall_clock
from trainium_operator.cluster.api.resources import EVENTS, JOBS, NETWORK_POLICIES, PODS
from trainium_operator.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


SETTINGS = Settings(job_network_policy=True, operator_labels="app=operator")
NAME = "llama-workers"


class Scenario:
    """One job, its workers, and an operator that makes policies."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.cluster = FakeCluster(wall_clock)
        self.process = OperatorProcess(self.cluster, settings=settings)
        self.workers = Workers(self.cluster, nodes=4, total_steps=100_000)
        self.workers.operator = self.process

    def condition(self) -> dict[str, Any]:
        status = self.cluster.get(JOBS, "default", "llama").get("status") or {}
        return next((each for each in status.get("conditions", ()) if each["type"] == "NetworkPolicyApplied"), {})

    def writes(self, method: str) -> int:
        mine = [each for each in self.cluster.writes if NETWORK_POLICIES.plural in each.path]
        return len([each for each in mine if method in each.method])

    def policies(self) -> list[str]:
        return self.cluster.names(NETWORK_POLICIES)

    async def trains(self) -> None:
        step = self.workers.step
        await until(lambda: self.workers.step > step + 5, 120, "it trains")

    async def recovers(self) -> None:
        """One worker is deleted, and another one takes its place."""
        lost = self.cluster.names(PODS)[0]
        self.cluster.remove(PODS, "default", lost)
        await until(lambda: len(self.cluster.names(PODS)) == 2, 20, "a new worker")
        await self.trains()


def run_scenario(run: Callable[[Scenario], Awaitable[None]], create: Callable[[], Scenario] = Scenario) -> Scenario:
    async def whole() -> Scenario:
        made = create()
        running = asyncio.create_task(made.workers.run())
        made.cluster.add(JOBS, training_job("llama", replicas=2))
        await made.process.start()
        try:
            await run(made)
        finally:
            running.cancel()
            await made.process.kill()
        return made

    return run_virtual(whole())


def refusing(answer: Any, *, of: str = "") -> Fault:
    """A fault for every request about policies, or those of one method."""
    return lambda method, path: answer if NETWORK_POLICIES.plural in path and of in method else None


def test_it_is_written_once_behind_the_first_pods_and_deleted_with_the_job() -> None:
    async def run(scenario: Scenario) -> None:
        await scenario.trains()
        policy = scenario.cluster.get(NETWORK_POLICIES, "default", NAME)
        assert policy["apiVersion"] == "networking.k8s.io/v1"
        assert policy["spec"]["ingress"][1]["from"][0]["podSelector"] == {"matchLabels": {"app": "operator"}}
        await scenario.recovers()
        await asyncio.sleep(1300)  # past lists and resyncs
        assert scenario.condition() == {}
        assert (scenario.writes("POST"), scenario.writes("PATCH")) == (1, 0)
        paths = [write.path for write in scenario.cluster.writes if write.method == "POST"]
        first = next(at for at, path in enumerate(paths) if path.endswith("/networkpolicies"))
        assert len([path for path in paths[:first] if path.endswith("/pods")]) == 2
        scenario.cluster.remove(JOBS, "default", "llama")
        assert scenario.policies() == []

    run_scenario(run)


def test_without_the_setting_nothing_is_read_or_written() -> None:
    async def run(scenario: Scenario) -> None:
        await scenario.trains()
        assert not [path for _, path in scenario.cluster.requests if NETWORK_POLICIES.plural in path]

    run_scenario(run, lambda: Scenario(Settings()))


def test_a_deleted_policy_is_recreated_and_an_edited_one_is_reverted() -> None:
    async def run(scenario: Scenario) -> None:
        await scenario.trains()
        scenario.cluster.remove(NETWORK_POLICIES, "default", NAME)
        await until(lambda: scenario.policies() == [NAME], 30, "it is back")

        def edit(raw: dict[str, Any]) -> None:
            raw["metadata"]["annotations"] = {}
            raw["spec"]["ingress"] = [{}]

        scenario.cluster.change(NETWORK_POLICIES, "default", NAME, edit)
        whole = lambda: len(scenario.cluster.get(NETWORK_POLICIES, "default", NAME)["spec"]["ingress"]) == 2  # noqa: E731
        await until(whole, 30, "it is as it was")

    run_scenario(run)


def test_a_policy_of_our_name_that_is_somebody_else_s_is_left_alone_and_reported_while_the_job_trains() -> None:
    async def run(scenario: Scenario) -> None:
        mine = scenario.cluster.add(NETWORK_POLICIES, {"metadata": {"name": NAME}, "spec": {"podSelector": {}}})
        await until(lambda: scenario.condition().get("reason") == "NameTaken", 60, "the condition")
        assert f"NetworkPolicy {NAME} exists and does not belong to this job" in scenario.condition()["message"]
        await scenario.recovers()
        await asyncio.sleep(600)
        assert scenario.cluster.get(NETWORK_POLICIES, "default", NAME) == mine
        assert scenario.writes("") < 12, "it is not insisted"
        scenario.cluster.remove(NETWORK_POLICIES, "default", NAME)
        await until(lambda: scenario.condition().get("status") == "True", 330, "the job has its own")
        assert scenario.cluster.get(NETWORK_POLICIES, "default", NAME)["metadata"]["ownerReferences"]

    run_scenario(run)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (refusing(refuse(403, "Forbidden", "networkpolicies is forbidden: old role")), "old role"),
        (refusing(refuse(403, "Forbidden", "denied by admission"), of="POST"), "denied by admission"),
        (refusing(refuse(500, "InternalError", "failed calling webhook"), of="POST"), "failed calling webhook"),
    ],
)
def test_a_refused_policy_is_reported_and_the_job_trains_and_recovers(fault: Fault, words: str) -> None:
    async def run(scenario: Scenario) -> None:
        scenario.cluster.faults.append(fault)
        await scenario.trains()
        await until(lambda: scenario.condition().get("status") == "False", 60, "the condition")
        assert (scenario.condition()["reason"], words in scenario.condition()["message"]) == ("WriteFailed", True)
        events = [raw for key, raw in scenario.cluster.objects.items() if key[0] == EVENTS.plural]
        assert [words in raw["note"] for raw in events if raw["reason"] == "WriteFailed"] == [True]
        await scenario.recovers()
        scenario.cluster.faults.clear()
        await until(lambda: scenario.condition().get("status") == "True", 400, "it is made once it may be")
        assert scenario.policies() == [NAME]

    run_scenario(run)


def test_another_operator_that_takes_over_writes_nothing() -> None:
    async def run(scenario: Scenario) -> None:
        await scenario.trains()
        await until(lambda: scenario.policies() == [NAME], 30, "the policy")
        before = (scenario.writes("POST"), scenario.writes("PATCH"))
        await scenario.process.kill()
        scenario.process = OperatorProcess(scenario.cluster, settings=SETTINGS, identity="operator-1")
        scenario.workers.operator = scenario.process
        await scenario.process.start()
        await scenario.trains()
        await asyncio.sleep(60)
        assert (scenario.writes("POST"), scenario.writes("PATCH")) == before

    run_scenario(run)


def test_no_other_right_is_used_than_the_table_gives_for_it() -> None:
    async def run(scenario: Scenario) -> None:
        await scenario.trains()
        scenario.cluster.remove(NETWORK_POLICIES, "default", NAME)
        await scenario.trains()

    scenario = run_scenario(run)
    verbs = {"POST": "create", "PATCH": "patch", "WATCH": "watch", "GET": "get"}
    used = {verbs[method] for method, path in scenario.cluster.requests if NETWORK_POLICIES.plural in path}
    (right,) = [each for each in RIGHTS if each.scope is Scope.NETWORK_POLICIES]
    assert used <= set(right.verbs)
    assert "create" in used
