"""Peers that the NetworkPolicy of a job admits."""

from __future__ import annotations

from typing import Any

import pytest
from plan_builders import SETTINGS, job, spec

from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE, ROLE_EVALUATION
from trainium_operator.plan.features.network_policy.policy import network_policy
from trainium_operator.plan.manifests.worker_pod import pod_template
from trainium_operator.plan.model import names
from trainium_operator.plan.model.observed import WorkerIngress

OPERATOR = {"app.kubernetes.io/name": "trainium-operator", "app.kubernetes.io/instance": "prod"}
INGRESS = WorkerIngress(operator_namespace="trainium-system", operator_labels=OPERATOR)


def spec_of(ingress: WorkerIngress = INGRESS, **workers: Any) -> dict[str, Any]:
    found: dict[str, Any] = network_policy(job(spec(workers=workers)), ingress)["spec"]
    return found


def lets_in(policy: dict[str, Any], namespace: str, labels: dict[str, str], own: str = "default") -> list[Any]:
    """The ports that a pod reaches, as an implementation of the API decides; None stands for all."""
    found: list[Any] = []
    for rule in policy["ingress"]:
        for peer in rule.get("from", [{"namespaceSelector": {}}]):
            space = peer.get("namespaceSelector")
            wanted = None if space is None else space.get("matchLabels", {}).get("kubernetes.io/metadata.name")
            there = namespace == own if space is None else wanted in (None, namespace)
            if there and peer.get("podSelector", {}).get("matchLabels", {}).items() <= labels.items():
                found.append(rule.get("ports"))
    return found


def test_it_selects_every_pod_that_the_operator_creates_and_nothing_else_of_the_job() -> None:
    selected = spec_of()["podSelector"]
    labels = pod_template(job(), SETTINGS)["metadata"]["labels"]
    assert selected["matchLabels"] == {LABEL_JOB: "demo"}
    assert selected["matchExpressions"] == [{"key": LABEL_ROLE, "operator": "Exists"}]
    assert labels.items() >= {LABEL_JOB: "demo", LABEL_ROLE: "worker"}.items()
    assert spec_of()["policyTypes"] == ["Ingress"]


@pytest.mark.parametrize(
    ("namespace", "labels", "ports"),
    [
        ("default", names.selector_labels("demo"), [None]),
        ("trainium-system", {**OPERATOR, "pod-template-hash": "5d"}, [[{"protocol": "TCP"}]]),
        ("default", names.selector_labels("other"), []),
        ("default", {LABEL_JOB: "demo", LABEL_ROLE: ROLE_EVALUATION}, []),
        ("default", {"app": "browser"}, []),
        ("elsewhere", names.selector_labels("demo"), []),
        ("default", OPERATOR, []),
        ("trainium-system", {"app.kubernetes.io/name": "trainium-operator"}, []),
    ],
)
def test_workers_of_the_job_and_the_operator_come_in_and_nobody_else(
    namespace: str, labels: dict[str, str], ports: list[Any]
) -> None:
    assert lets_in(spec_of(), namespace, labels) == ports


def test_rules_of_the_chart_are_added_as_they_are() -> None:
    rule = {"from": [{"namespaceSelector": {}}], "ports": [{"port": 6006}]}
    added = WorkerIngress(operator_namespace="s", operator_labels=OPERATOR, rules=(rule,))
    assert spec_of(added)["ingress"][2:] == [rule]
    assert len(spec_of()["ingress"]) == 2


def test_where_new_workers_are_on_the_network_of_their_host_all_are_let_in() -> None:
    assert spec_of(template={"spec": {"hostNetwork": True}})["ingress"] == [{}]
    assert len(spec_of(template={"spec": {"hostNetwork": False}})["ingress"]) == 2


def test_the_job_owns_it_and_its_digest_changes_with_who_is_let_in() -> None:
    one, same = (network_policy(job(), INGRESS) for _ in range(2))
    assert one == same
    assert one["metadata"]["ownerReferences"][0]["controller"]
    assert one["metadata"]["labels"]["trainium.dev/job-name"] == "demo"
    other = network_policy(job(), WorkerIngress(operator_namespace="moved", operator_labels=OPERATOR))
    assert other["metadata"]["annotations"] != one["metadata"]["annotations"]
