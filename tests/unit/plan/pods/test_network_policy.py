"""The NetworkPolicy of a job: which peers it admits, when it is written, and what is reported otherwise."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW, SETTINGS
from tests.unit.plan.plan_results import PlanResult, make_plan
from trainium_contract.status.conditions import ConditionType
from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE, ROLE_EVALUATION
from trainium_operator.plan.features.network_policy import KIND, build_network_policy
from trainium_operator.plan.manifests.worker_pod import build_pod_template
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyOptional
from trainium_operator.plan.model.conditions import find_condition, set_condition
from trainium_operator.plan.model.observed import Observed, WorkerIngress, WriteRefusal
from trainium_operator.plan.model.reasons import Reason

INGRESS = WorkerIngress(operator_namespace="system", operator_labels={"app": "operator"})
PLACE = f"{KIND}/demo-workers"


def plan_policy(observed: Observed, ingress: WorkerIngress | None = INGRESS) -> PlanResult:
    return make_plan(observed, replace(SETTINGS, worker_ingress=ingress))


def running_job(**changes: Any) -> Observed:
    return build.running_job(policies_listed=True, **changes)


def with_policy(observed: Observed) -> Observed:
    digest = build_network_policy(observed.job, INGRESS)["metadata"]["annotations"][names.ANNOTATION_CONTENT_HASH]
    return replace(observed, children={**observed.children, PLACE: digest})


def policy_condition(result: PlanResult) -> tuple[str, str, str] | None:
    condition = find_condition(result.status, ConditionType.NETWORK_POLICY_APPLIED)
    return None if condition is None else (condition.status.value, condition.reason, condition.message)


def with_status_of(observed: Observed, result: PlanResult, **changes: Any) -> Observed:
    return replace(observed, job=replace(observed.job, status=result.status), **changes)


def test_the_network_policy_is_written_last_and_once_pods_exist() -> None:
    first = plan_policy(build.observation(build.job(), policies_listed=True))
    assert len(first.created_pods) == 4
    assert first.actions_of_type(ApplyOptional) == []
    then = plan_policy(build.observation(build.job(), (build.pod(0),), policies_listed=True))
    assert len(then.created_pods) > 0
    assert isinstance(then.actions[-1], ApplyOptional)
    assert policy_condition(then) is None


def test_an_unchanged_policy_is_not_written_again_and_a_different_one_is() -> None:
    assert plan_policy(with_policy(running_job())).actions_of_type(ApplyOptional) == []
    moved = replace(INGRESS, operator_namespace="elsewhere")
    (action,) = plan_policy(with_policy(running_job()), moved).actions_of_type(ApplyOptional)
    assert action.manifest["spec"]["ingress"][1]["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "elsewhere"
    }


def refuse(*arguments: Any, **changes: Any) -> dict[str, WriteRefusal]:
    return {PLACE: WriteRefusal(*arguments, **changes)}


@pytest.mark.parametrize("ingress", [None, INGRESS])
def test_without_the_setting_or_before_the_policies_were_read_none_is_written(ingress: WorkerIngress | None) -> None:
    result = plan_policy(replace(running_job(), policies_listed=ingress is None), ingress)
    assert result.actions_of_type(ApplyOptional) == []
    assert (result.requeue_after is not None and result.requeue_after <= 5.0) or ingress is None


@pytest.mark.parametrize(
    ("taken", "state", "reason"), [(False, "False", "WriteFailed"), (True, "Unknown", "NameTaken")]
)
def test_a_refusal_is_reported_once_and_retried_after_its_pause_while_the_job_continues(
    taken: bool, state: str, reason: str
) -> None:
    observed = running_job(refusals=refuse("may not create it", taken, NOW + 30))
    result = plan_policy(observed)
    assert result.actions_of_type(ApplyOptional) == []
    problem = policy_condition(result)
    assert problem is not None
    assert problem[:2] == (state, reason)
    assert "others can reach the workers' ports: may not create it" in problem[2]
    assert [event.reason for event in result.events].count(reason) == 1
    assert not any(
        condition.reason == "Stalled" and condition.status == "True" for condition in result.status.conditions
    )
    stalled = result.condition(ConditionType.STALLED)
    assert stalled.status.value == "False"
    again = plan_policy(with_status_of(observed, result))
    assert not [event for event in again.events if event.reason == reason]
    assert again.requeue_after is not None
    assert again.requeue_after <= 30
    late = plan_policy(with_status_of(observed, result, now=NOW + 31))
    assert len(late.actions_of_type(ApplyOptional)) == 1


def test_a_refused_network_policy_does_not_block_replacement() -> None:
    observed = running_job(refusals=refuse("no", name_in_use=False, retry_at=NOW + 30))
    fewer = replace(observed, pods=observed.pods[1:])
    assert plan_policy(fewer).created_pods == plan_policy(fewer, None).created_pods != []


def test_the_policy_condition_follows_the_setting() -> None:
    observed = running_job(refusals=refuse("no", name_in_use=False, retry_at=NOW))
    result = plan_policy(observed)
    done = plan_policy(with_policy(with_status_of(observed, result, refusals={})))
    assert policy_condition(done) == ("True", "PolicyApplied", "")
    assert policy_condition(plan_policy(with_status_of(observed, result), None)) is None


def test_host_network_jobs_get_no_policy_and_open_an_existing_one() -> None:
    hosts = build.spec(workers={"template": {"spec": {"hostNetwork": True}}})
    observed = running_job(job_spec=hosts)
    assert plan_policy(observed).actions_of_type(ApplyOptional) == []
    (action,) = plan_policy(replace(observed, children={**observed.children, PLACE: "of-before"})).actions_of_type(
        ApplyOptional
    )
    assert action.manifest["spec"]["ingress"] == [{}]


def test_an_ended_job_gets_no_network_policy() -> None:
    observed = running_job()
    ended = set_condition(observed.job.status, ConditionType.COMPLETE, True, Reason.COMPLETED, "", now=NOW)
    assert plan_policy(observed).actions_of_type(ApplyOptional)
    assert plan_policy(build.with_status(observed, ended)).actions_of_type(ApplyOptional) == []


OPERATOR = {"app.kubernetes.io/name": "trainium-operator", "app.kubernetes.io/instance": "prod"}
ADMITTED = WorkerIngress(operator_namespace="trainium-system", operator_labels=OPERATOR)


def spec_of(ingress: WorkerIngress = ADMITTED, **workers: Any) -> dict[str, Any]:
    policy_spec: dict[str, Any] = build_network_policy(build.job(build.spec(workers=workers)), ingress)["spec"]
    return policy_spec


def admitted_ports(policy: dict[str, Any], namespace: str, labels: dict[str, str]) -> list[Any]:
    """Return the ports that a pod can reach; None stands for all."""
    policies: list[Any] = []
    for rule in policy["ingress"]:
        for peer in rule.get("from", [{"namespaceSelector": {}}]):
            space = peer.get("namespaceSelector")
            wanted = None if space is None else space.get("matchLabels", {}).get("kubernetes.io/metadata.name")
            selects_namespace = namespace == "default" if space is None else wanted in (None, namespace)
            if selects_namespace and peer.get("podSelector", {}).get("matchLabels", {}).items() <= labels.items():
                policies.append(rule.get("ports"))
    return policies


def test_the_network_policy_selects_all_pods_of_the_job() -> None:
    selected = spec_of()["podSelector"]
    labels = build_pod_template(build.job(), SETTINGS)["metadata"]["labels"]
    assert selected["matchLabels"] == {LABEL_JOB: "demo"}
    assert selected["matchExpressions"] == [{"key": LABEL_ROLE, "operator": "Exists"}]
    assert labels.items() >= {LABEL_JOB: "demo", LABEL_ROLE: "worker"}.items()
    assert spec_of()["policyTypes"] == ["Ingress"]


@pytest.mark.parametrize(
    ("namespace", "labels", "ports"),
    [
        ("default", names.build_selector_labels("demo"), [None]),
        ("trainium-system", {**OPERATOR, "pod-template-hash": "5d"}, [[{"protocol": "TCP"}]]),
        ("default", names.build_selector_labels("other"), []),
        ("default", {LABEL_JOB: "demo", LABEL_ROLE: ROLE_EVALUATION}, []),
        ("default", {"app": "browser"}, []),
        ("elsewhere", names.build_selector_labels("demo"), []),
        ("default", OPERATOR, []),
        ("trainium-system", {"app.kubernetes.io/name": "trainium-operator"}, []),
    ],
)
def test_only_workers_of_the_job_and_the_operator_are_admitted(
    namespace: str, labels: dict[str, str], ports: list[Any]
) -> None:
    assert admitted_ports(spec_of(), namespace, labels) == ports


def test_rules_of_the_chart_are_added_as_they_are() -> None:
    rule = {"from": [{"namespaceSelector": {}}], "ports": [{"port": 6006}]}
    added = WorkerIngress(operator_namespace="s", operator_labels=OPERATOR, rules=(rule,))
    assert spec_of(added)["ingress"][2:] == [rule]
    assert len(spec_of()["ingress"]) == 2


def test_host_network_workers_admit_everybody() -> None:
    assert spec_of(template={"spec": {"hostNetwork": True}})["ingress"] == [{}]
    assert len(spec_of(template={"spec": {"hostNetwork": False}})["ingress"]) == 2


def test_the_network_policy_is_owned_and_hashed() -> None:
    policy, equal_policy = (build_network_policy(build.job(), ADMITTED) for _ in range(2))
    assert policy == equal_policy
    assert policy["metadata"]["ownerReferences"][0]["controller"]
    assert policy["metadata"]["labels"]["trainium.dev/job-name"] == "demo"
    moved_policy = build_network_policy(
        build.job(), WorkerIngress(operator_namespace="moved", operator_labels=OPERATOR)
    )
    assert moved_policy["metadata"]["annotations"] != policy["metadata"]["annotations"]
