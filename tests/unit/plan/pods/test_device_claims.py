"""When the template is made and removed, what waits where devices cannot be claimed, and reports about devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_builders import SETTINGS, agent, created, deleted, job, newest, observed, pod, running, spec, with_pod

from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_operator.plan.features.dra.template import claim_template
from trainium_operator.plan.model.actions import ApplyObject, CreatePod, DeleteTemplate, Plan
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import ApiState, DevicesView, DeviceTaint, Observed, PodPhase
from trainium_operator.plan.plan import plan

SPEC = spec(workers={"accelerator": {"device": "cpu", "claim": {"count": 16}}})


def name() -> str:
    template = claim_template(job(SPEC))
    assert template is not None
    found: str = template["metadata"]["name"]
    return found


def planned(seen: Observed, state: ApiState = ApiState.READY) -> Plan:
    return plan(seen, replace(SETTINGS, dra=state))


def condition_of(result: Plan, kind: ConditionType) -> tuple[str, str, str]:
    condition = find_condition(result.status, kind)
    assert condition is not None
    return condition.status.value, condition.reason, condition.message


def trains(taints: dict[int, str] | None = None, **changes: Any) -> Observed:
    """Four workers and a spare that hold devices; `taints`: ordinal -> effect."""
    job_spec = spec(workers={"spares": 1, "accelerator": {"device": "cpu", "claim": {"count": 16}}})
    notes = {
        f"uid-{at}": (DeviceTaint(f"node-{at}/neurondevice3", "neuron.aws.com/x", effect),)
        for at, effect in (taints or {}).items()
    }
    pods = tuple(pod(at, claim_template=name()) for at in range(5))
    devices = DevicesView(templates={name(): "t-uid"}, taints=notes)
    return running(4, spares=1, job_spec=job_spec, pods=pods, devices=devices, **changes)


def test_the_template_is_made_before_the_pods_that_refer_to_it() -> None:
    result = planned(observed(job(SPEC), devices=DevicesView()))
    kinds = [type(action) for action in result.actions]
    applied = [action.manifest for action in result.actions if isinstance(action, ApplyObject)]
    assert [each["kind"] for each in applied] == ["ResourceClaimTemplate"]
    assert kinds.index(ApplyObject) < kinds.index(CreatePod)


def test_a_template_that_is_there_is_not_written_again() -> None:
    assert planned(observed(job(SPEC), devices=DevicesView(templates={name(): "u"}))).actions[0].__class__ is CreatePod


def test_a_template_of_an_earlier_shape_goes_once_no_pod_refers_to_it() -> None:
    both = DevicesView(templates={name(): "u", "demo-devices-old": "old-uid"})
    seen = replace(trains(), devices=both)
    assert DeleteTemplate("demo-devices-old", "old-uid") in planned(seen).actions
    kept = with_pod(seen, pod(4, claim_template="demo-devices-old"))
    assert not any(isinstance(action, DeleteTemplate) for action in planned(kept).actions)


def test_with_fields_of_a_newer_version_a_template_is_made_and_none_removed() -> None:
    seen = observed(job(SPEC, unknown=("spec.new",)), devices=DevicesView(templates={"demo-devices-newer": "u"}))
    actions = planned(seen).actions
    assert any(isinstance(each, ApplyObject) and each.manifest["metadata"]["name"] == name() for each in actions)
    assert not any(isinstance(each, DeleteTemplate) for each in actions)


def test_a_job_that_claims_nothing_any_more_has_its_template_removed() -> None:
    seen = observed(job(spec()), devices=DevicesView(templates={name(): "u"}))
    assert DeleteTemplate(name(), "u") in planned(seen).actions


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        (ApiState.OFF, "DeviceApiMissing", "install the chart with dra.enabled=true"),
        (ApiState.ABSENT, "DeviceApiMissing", "does not serve resource.k8s.io/v1"),
        (ApiState.READING, "WaitingForDevices", "is being read"),
    ],
)
def test_a_job_that_cannot_claim_waits_and_reports_the_reason(state: ApiState, reason: str, words: str) -> None:
    result = planned(observed(job(SPEC)), state)
    assert created(result) == []
    for kind in (ConditionType.ADMITTED, ConditionType.PODS_READY):
        status, why, message = condition_of(result, kind)
        assert (status, why) == ("False", reason)
        assert words in message


@pytest.mark.parametrize("state", list(ApiState))
def test_a_job_without_a_claim_does_not_wait(state: ApiState) -> None:
    assert len(created(planned(observed(job(spec())), state))) == 4


def test_what_runs_goes_on_when_devices_cannot_be_claimed_any_more() -> None:
    result = planned(replace(trains(), devices=None), ApiState.ABSENT)
    assert (created(result), deleted(result), result.status.phase) == ([], {}, Phase.RUNNING)


def test_a_member_whose_device_is_tainted_hands_its_rank_to_a_spare_before_it_is_evicted() -> None:
    result = planned(trains({1: "NoExecute"}))
    entry = newest(result)
    assert (entry.cause, entry.node) == (Cause.DEVICE_TAINTED, "node-1")
    assert "device taint neuron.aws.com/x (NoExecute, device node-1/neurondevice3)" in entry.message
    assert result.status.failures == ()
    assert result.status.avoided_nodes == ()


def test_a_new_worker_may_come_back_to_other_devices_of_the_same_node() -> None:
    seen = trains({1: "NoExecute"})
    result = planned(replace(seen, pods=seen.pods[:4]))  # without its spare, so pods are made
    made = [action.manifest for action in result.actions if isinstance(action, CreatePod)]
    assert made
    assert not any("nodeAffinity" in each["spec"]["affinity"] for each in made)


@pytest.mark.parametrize("effect", ["NoSchedule", "None"])
def test_a_taint_that_does_not_evict_moves_nobody(effect: str) -> None:
    result = planned(trains({1: effect}))
    assert result.status.history == ()
    healthy = find_condition(result.status, ConditionType.NODES_HEALTHY)
    assert healthy is not None
    assert healthy.status.value == ("False" if effect == "NoSchedule" else "True")


def test_an_eviction_for_a_tainted_device_has_its_own_cause_and_is_nobodys_failure() -> None:
    evicted = pod(1, claim_template=name(), deleting=True, disrupted=True, disruption="DeletionByDeviceTaintManager")
    result = planned(with_pod(trains({1: "NoExecute"}), evicted))
    assert newest(result).cause is Cause.DEVICE_TAINTED
    assert newest(result).message == (
        "pod demo-w-1 on node node-1 is being deleted or evicted: "
        "device taint neuron.aws.com/x (NoExecute, device node-1/neurondevice3)"
    )
    assert result.status.failures == ()
    plain = replace(evicted, disruption="EvictionByEvictionAPI")
    assert newest(planned(with_pod(trains(), plain))).cause is Cause.PREEMPTED


def test_a_device_that_the_kubelet_calls_unhealthy_is_left_with_its_node() -> None:
    ill = pod(1, claim_template=name(), device_health=("Unhealthy", "neuron.aws.com/node-1/neurondevice3: HBM"))
    result = planned(with_pod(trains(), ill))
    assert newest(result).cause is Cause.DEVICE
    assert "claim health (Unhealthy, neuron.aws.com/node-1/neurondevice3: HBM)" in newest(result).message
    assert result.status.avoided_nodes == ("node-1",)


def test_free_nodes_are_reported_while_a_pod_finds_none() -> None:
    waiting = pod(
        0,
        phase=PodPhase.PENDING,
        node="",
        unschedulable_message="0/3 nodes are available: 2 cannot allocate all claims.",
    )
    devices = DevicesView(templates={name(): "u"}, free_nodes=("a",), nodes=3)
    result = planned(observed(job(SPEC), (waiting,), {}, devices=devices, nodes={}))
    _, reason, message = condition_of(result, ConditionType.PODS_READY)
    assert reason == "Unschedulable"
    assert "2 cannot allocate all claims. Nodes that have 16 free devices: 1 of 3." in message


def test_devices_that_a_device_plugin_left_behind_on_the_node_are_not_missed() -> None:
    job_spec = spec(
        workers={"accelerator": {"instanceType": "trn1.32xlarge", "claim": {}}}, trainer={"batch": {"globalSize": 128}}
    )
    seen = running(4, job_spec=job_spec, devices=DevicesView(templates={"x": "u"}), agents={4: agent(4)})
    left = {
        at: replace(
            view, capacity={"aws.amazon.com/neuron": 3}, labels={"node.kubernetes.io/instance-type": "trn1.32xlarge"}
        )
        for at, view in seen.nodes.items()
    }
    assert condition_of(planned(replace(seen, nodes=left)), ConditionType.NODES_HEALTHY)[0] == "True"
    plain = running(
        4,
        job_spec=spec(
            workers={"accelerator": {"instanceType": "trn1.32xlarge"}}, trainer={"batch": {"globalSize": 128}}
        ),
    )
    assert condition_of(planned(replace(plain, nodes=left)), ConditionType.NODES_HEALTHY)[0] == "False"
