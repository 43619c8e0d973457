"""When the NetworkPolicy of a job is written, and what is reported where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_builders import NOW, SETTINGS, condition_of, created, job, observed, pod, running, spec, with_status

from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.features.network_policy.policy import KIND, network_policy
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyPolicy, Plan
from trainium_operator.plan.model.conditions import find_condition, with_condition
from trainium_operator.plan.model.observed import Observed, WorkerIngress, WriteRefusal
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.plan import plan

INGRESS = WorkerIngress(operator_namespace="system", operator_labels={"app": "operator"})
PLACE = f"{KIND}/demo-workers"


def planned(seen: Observed, ingress: WorkerIngress | None = INGRESS) -> Plan:
    return plan(seen, replace(SETTINGS, worker_ingress=ingress))


def trains(**changes: Any) -> Observed:
    return running(policies_known=True, **changes)


def with_policy(seen: Observed, ingress: WorkerIngress = INGRESS) -> Observed:
    digest = network_policy(seen.job, ingress)["metadata"]["annotations"][names.ANNOTATION_CONTENT_HASH]
    return replace(seen, children={**seen.children, PLACE: digest})


def written(result: Plan) -> list[ApplyPolicy]:
    return [action for action in result.actions if isinstance(action, ApplyPolicy)]


def problem_of(result: Plan) -> tuple[str, str, str] | None:
    found = find_condition(result.status, ConditionType.NETWORK_POLICY_APPLIED)
    return None if found is None else (found.status.value, found.reason, found.message)


def after(seen: Observed, result: Plan, **changes: Any) -> Observed:
    return replace(seen, job=replace(seen.job, status=result.status), **changes)


def test_it_is_written_once_there_are_pods_and_after_whatever_else_is_done() -> None:
    first = planned(observed(job(), policies_known=True))
    assert len(created(first)) == 4
    assert written(first) == []
    then = planned(observed(job(), (pod(0),), policies_known=True))
    assert len(created(then)) > 0
    assert isinstance(then.actions[-1], ApplyPolicy)
    assert problem_of(then) is None


def test_an_unchanged_policy_is_not_written_again_and_a_different_one_is() -> None:
    assert written(planned(with_policy(trains()))) == []
    moved = replace(INGRESS, operator_namespace="elsewhere")
    (action,) = written(planned(with_policy(trains()), moved))
    assert action.manifest["spec"]["ingress"][1]["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "elsewhere"
    }


@pytest.mark.parametrize("ingress", [None, INGRESS])
def test_without_the_setting_or_before_the_policies_were_read_none_is_written(ingress: WorkerIngress | None) -> None:
    result = planned(replace(trains(), policies_known=ingress is None), ingress)
    assert written(result) == []
    assert (result.requeue_after is not None and result.requeue_after <= 5.0) or ingress is None


@pytest.mark.parametrize(
    ("taken", "state", "reason"), [(False, "False", "WriteFailed"), (True, "Unknown", "NameTaken")]
)
def test_a_refusal_is_reported_once_and_retried_after_its_pause_while_the_job_continues(
    taken: bool, state: str, reason: str
) -> None:
    seen = trains(policy_refusal=WriteRefusal("may not create it", taken, NOW + 30))
    result = planned(seen)
    assert written(result) == []
    problem = problem_of(result)
    assert problem is not None
    assert problem[:2] == (state, reason)
    assert "others can reach the workers' ports: may not create it" in problem[2]
    assert [each.reason for each in result.events].count(reason) == 1
    assert not any(each.reason == "Stalled" and each.status == "True" for each in result.status.conditions)
    stalled = condition_of(result.status, ConditionType.STALLED)
    assert stalled.status.value == "False"
    again = planned(after(seen, result))
    assert not [each for each in again.events if each.reason == reason]
    assert again.requeue_after is not None
    assert again.requeue_after <= 30
    late = planned(after(seen, result, now=NOW + 31))
    assert len(written(late)) == 1


def test_a_refusal_keeps_no_lost_worker_from_being_replaced() -> None:
    seen = trains(policy_refusal=WriteRefusal("no", taken=False, again_from=NOW + 30))
    fewer = replace(seen, pods=seen.pods[1:])
    assert created(planned(fewer)) == created(planned(fewer, None)) != []


def test_the_condition_shows_a_policy_that_is_there_and_disappears_when_it_is_switched_off() -> None:
    seen = trains(policy_refusal=WriteRefusal("no", taken=False, again_from=NOW))
    result = planned(seen)
    done = planned(with_policy(after(seen, result, policy_refusal=None)))
    assert problem_of(done) == ("True", "PolicyApplied", "")
    assert problem_of(planned(after(seen, result), None)) is None


def test_on_the_network_of_the_host_none_is_made_and_one_that_is_there_is_opened() -> None:
    hosts = spec(workers={"template": {"spec": {"hostNetwork": True}}})
    seen = trains(job_spec=hosts)
    assert written(planned(seen)) == []
    (action,) = written(planned(replace(seen, children={**seen.children, PLACE: "of-before"})))
    assert action.manifest["spec"]["ingress"] == [{}]


def test_a_job_that_has_ended_gets_none() -> None:
    seen = trains()
    ended = with_condition(seen.job.status, ConditionType.COMPLETE, True, Reason.COMPLETED, "", now=NOW)
    assert written(planned(seen))
    assert written(planned(with_status(seen, ended))) == []
