"""Objects that policies, webhooks or other clients store other than the operator requested them, or refuse."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.testing.api.fake_api_server import http_error
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.operator_process import OperatorProcess, until
from tests.testing.virtual.replicas import Scenario
from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE
from trainium_operator.cluster.api.resources import CONFIG_MAPS, DISRUPTION_BUDGETS, NETWORK_POLICIES, PODS, Resource
from trainium_operator.plan.model.names import ANNOTATION_CONTENT_HASH
from trainium_operator.settings import Settings

Json = dict[str, Any]
Mutation = Callable[[Json], None]
SETTINGS = Settings(job_network_policy=True, operator_labels="app=operator")
OWN = (CONFIG_MAPS, DISRUPTION_BUDGETS, NETWORK_POLICIES)


class PolicedCluster(Scenario):
    """A cluster whose policies change or refuse some objects of a job."""

    def __init__(self, *kinds: Resource, mutation: Mutation | None = None) -> None:
        super().__init__(training_job(spares=1), nodes=6, settings=SETTINGS)
        if mutation is not None:
            self.cluster.mutate = lambda resource, raw: mutation(raw) if self._is_of_job(resource, raw, kinds) else None

    def _is_of_job(self, resource: Resource, raw: Json, kinds: tuple[Resource, ...]) -> bool:
        return resource in kinds and raw["metadata"]["namespace"] == "default"

    def writes(self, resource: Resource) -> int:
        return sum(f"/{resource.plural}" in write.path for write in self.cluster.writes)

    async def wait_for_replacement(self) -> None:
        generation = self.status()["membership"]["generation"]
        self.cluster.remove(PODS, "default", self.cluster.names(PODS)[0])
        await until(
            lambda: self.status()["membership"]["generation"] > generation and self.status()["phase"] == "Running",
            "another worker trains",
            20,
        )


def remove_annotations(raw: Json) -> None:
    raw["metadata"].pop("annotations", None)


def remove_labels(raw: Json) -> None:
    raw["metadata"].pop("labels", None)


def allow_everything(raw: Json) -> None:
    raw["spec"]["minAvailable"] = 0


def open_ports(raw: Json) -> None:
    raw["spec"]["ingress"] = [{}]


@pytest.mark.parametrize(
    ("kind", "mutation", "words"),
    [
        (CONFIG_MAPS, remove_annotations, f"metadata.annotations[{ANNOTATION_CONTENT_HASH}] is missing"),
        (DISRUPTION_BUDGETS, remove_annotations, f"metadata.annotations[{ANNOTATION_CONTENT_HASH}] is missing"),
        (DISRUPTION_BUDGETS, remove_labels, "metadata.labels["),
        (DISRUPTION_BUDGETS, allow_everything, "spec.minAvailable is 0"),
        (NETWORK_POLICIES, open_ports, "spec.ingress is [{}]"),
        (NETWORK_POLICIES, remove_labels, "metadata.labels["),
    ],
)
@in_virtual_time
async def test_a_changed_object_is_reported_and_not_written_without_end(
    kind: Resource, mutation: Mutation, words: str
) -> None:
    async with PolicedCluster(kind, mutation=mutation) as scenario:
        await scenario.wait_for_steps()
        named = "NetworkPolicyApplied" if kind is NETWORK_POLICIES else "Reconciled"
        await until(lambda: scenario.condition(named).get("status") == "False", "the condition", 30)
        assert scenario.condition(named)["reason"] == "ObjectChanged"
        assert words in scenario.condition(named)["message"]
        assert any(words in note for note in scenario.event_messages())
        before = scenario.writes(kind)
        await asyncio.sleep(600)
        assert scenario.writes(kind) - before <= 18, "8 attempts; one without labels is a creation and a patch"
        assert scenario.status()["phase"] == "Running"
        scenario.cluster.mutate = lambda _resource, _raw: None
        await until(lambda: scenario.condition(named).get("status") == "True", "it is as requested", 330)


@in_virtual_time
async def test_a_changed_object_is_still_reported_after_the_operator_restarts() -> None:
    async with PolicedCluster(NETWORK_POLICIES, mutation=open_ports) as scenario:
        await until(lambda: scenario.condition("NetworkPolicyApplied").get("status") == "False", "the condition", 60)
        await scenario.process.kill()
        before = scenario.writes(NETWORK_POLICIES)
        scenario.process = OperatorProcess(scenario.cluster, identity="operator-1", settings=SETTINGS)
        scenario.workers.operator = scenario.process
        await scenario.process.start()
        await scenario.process.runtime.leading.wait()
        await asyncio.sleep(30)
        assert scenario.condition("NetworkPolicyApplied")["reason"] == "ObjectChanged"
        assert 1 <= scenario.writes(NETWORK_POLICIES) - before <= 6


@in_virtual_time
async def test_a_budget_that_is_changed_is_not_reported_as_protection() -> None:
    async with PolicedCluster(DISRUPTION_BUDGETS, mutation=allow_everything) as scenario:
        await scenario.wait_for_steps()
        condition = lambda: scenario.condition("DisruptionAllowed")  # noqa: E731
        await until(lambda: condition().get("reason") == "ObjectChanged", "the condition", 60)
        assert condition()["status"] == "Unknown"
        assert "a drain may evict workers at any time" in condition()["message"]


@in_virtual_time
async def test_a_refused_budget_delays_no_replacement_and_is_not_reported_as_protection() -> None:
    async with PolicedCluster() as scenario:
        scenario.cluster.faults.append(
            lambda method, path: (
                http_error(403, "Forbidden", "exceeded quota")
                if method == "POST" and DISRUPTION_BUDGETS.plural in path
                else None
            )
        )
        await scenario.wait_for_steps()
        await until(lambda: scenario.condition("DisruptionAllowed").get("reason") == "WriteFailed", "the condition", 30)
        assert scenario.condition("DisruptionAllowed")["status"] == "Unknown"
        assert "exceeded quota" in scenario.condition("DisruptionAllowed")["message"]
        await scenario.wait_for_replacement()
        scenario.cluster.requests.clear()
        await asyncio.sleep(300)
        requests = scenario.cluster.requests
        assert sum(method == "POST" and DISRUPTION_BUDGETS.plural in path for method, path in requests) <= 8
        scenario.cluster.faults.clear()
        await until(lambda: scenario.cluster.names(DISRUPTION_BUDGETS) == ["llama"], "the budget", 330)
        await until(lambda: scenario.condition("Reconciled").get("status") == "True", "the condition", 30)


@in_virtual_time
async def test_an_object_that_another_client_changes_each_time_is_written_less_and_less_often() -> None:
    async with PolicedCluster() as scenario:
        await until(lambda: scenario.cluster.names(DISRUPTION_BUDGETS) == ["llama"], "the budget", 60)

        async def revert() -> None:
            while True:
                await asyncio.sleep(0.5)
                raw = scenario.cluster.get(DISRUPTION_BUDGETS, "default", "llama")
                if raw["spec"]["minAvailable"]:
                    scenario.cluster.change(DISRUPTION_BUDGETS, "default", "llama", allow_everything)

        other = asyncio.create_task(revert())
        await until(lambda: scenario.condition("Reconciled").get("status") == "False", "the condition", 60)
        assert "was changed or deleted by another client" in scenario.condition("Reconciled")["message"]
        before = scenario.writes(DISRUPTION_BUDGETS)
        await asyncio.sleep(600)
        assert scenario.writes(DISRUPTION_BUDGETS) - before <= 12
        other.cancel()
        await until(lambda: scenario.condition("Reconciled").get("status") == "True", "it stays", 700)


@pytest.mark.parametrize("label", [LABEL_JOB, LABEL_ROLE])
@in_virtual_time
async def test_pods_without_the_labels_by_which_they_are_found_are_not_created_without_end(label: str) -> None:
    async with PolicedCluster(PODS, mutation=lambda raw: raw["metadata"]["labels"].pop(label)) as scenario:
        await until(lambda: scenario.condition("PodsReady").get("reason") == "CreationRefused", "the condition", 30)
        assert f"metadata.labels[{label}] is missing" in scenario.condition("PodsReady")["message"]
        await asyncio.sleep(300)
        assert scenario.cluster.names(PODS) == []
        assert sum(write.method == "POST" and write.path.endswith("/pods") for write in scenario.cluster.writes) <= 12
        scenario.cluster.mutate = lambda _resource, _raw: None
        await scenario.wait_for_steps()


@in_virtual_time
async def test_a_membership_whose_record_is_not_stored_is_reported() -> None:
    async with PolicedCluster(CONFIG_MAPS, mutation=lambda raw: raw.pop("binaryData", None)) as scenario:
        await until(lambda: scenario.condition("Reconciled").get("reason") == "CreationRefused", "the condition", 60)
        assert (
            "ConfigMap llama-membership is stored other than requested" in scenario.condition("Reconciled")["message"]
        )
        before = scenario.writes(CONFIG_MAPS)
        await asyncio.sleep(300)
        assert scenario.writes(CONFIG_MAPS) - before <= 40
        assert scenario.status()["membership"]["generation"] <= 1


@in_virtual_time
async def test_every_object_has_the_common_labels_and_those_of_its_job() -> None:
    job = training_job(spares=1)
    job["metadata"]["labels"] = {"team": "ml", "cost": "job", "kueue.x-k8s.io/priority-class": "high", LABEL_JOB: "x"}
    async with Scenario(
        job,
        nodes=6,
        settings=Settings(job_network_policy=True, operator_labels="a=b", object_labels="cost=all,site=one"),
    ) as scenario:
        await scenario.wait_for_steps()
        await until(lambda: scenario.cluster.names(DISRUPTION_BUDGETS) == ["llama"], "the budget", 60)
        kinds = {"pods", "configmaps", "poddisruptionbudgets", "networkpolicies"}
        objects = {
            key: raw for key, raw in scenario.cluster.objects.items() if key[:2] in {(k, "default") for k in kinds}
        }
        assert {key[0] for key in objects} == kinds
        for raw in objects.values():
            labels = raw["metadata"]["labels"]
            assert {"team": "ml", "cost": "job", "site": "one", LABEL_JOB: "llama"}.items() <= labels.items()
            assert "kueue.x-k8s.io/priority-class" not in labels
        events = [raw for key, raw in scenario.cluster.objects.items() if key[0] == "events"]
        assert {raw["metadata"]["labels"]["site"] for raw in events} == {"one"}
        (lease,) = [raw for key, raw in scenario.cluster.objects.items() if key[:2] == ("leases", "system")]
        assert lease["metadata"]["labels"]["site"] == "one"


@in_virtual_time
async def test_a_refusal_names_the_kind_and_the_name() -> None:
    async with PolicedCluster() as scenario:
        scenario.cluster.faults.append(
            lambda method, path: (
                http_error(422, "Invalid", "every object needs the label team")
                if method == "POST" and path.endswith("/configmaps") and "/default/" in path
                else None
            )
        )
        await until(lambda: scenario.condition("PodsReady").get("reason") == "CreationRefused", "the condition", 30)
        assert "ConfigMap llama-config: every object needs the label team" in scenario.condition("PodsReady")["message"]


@in_virtual_time
async def test_a_refused_deletion_is_reported_and_delays_no_replacement() -> None:
    async with PolicedCluster() as scenario:
        await scenario.wait_for_steps()
        name = scenario.cluster.names(PODS)[0]
        scenario.cluster.faults.append(
            lambda method, path: http_error(403, "Forbidden", "pods are kept") if method == "DELETE" else None
        )
        scenario.cluster.change(PODS, "default", name, lambda raw: raw["status"].update(phase="Failed"))
        await until(lambda: "pods are kept" in scenario.condition("Reconciled").get("message", ""), "the condition", 60)
        assert f"Pod {name}" in scenario.condition("Reconciled")["message"]
        await until(lambda: scenario.status()["phase"] == "Running", "the spare trains", 60)
        await until(lambda: len(scenario.cluster.names(PODS)) == 4, "there is a new spare", 60)
        scenario.cluster.faults.clear()
        await until(lambda: scenario.condition("Reconciled").get("status") == "True", "it is deleted", 120)
