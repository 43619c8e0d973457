"""Device claims: templates and pods, what waits without the API, and reports about devices."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import SETTINGS
from tests.unit.plan.plan_results import PlanResult, make_plan
from tests.unit.plan.pod_manifests import container, environment, worker_pod
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_operator.plan.features.dra.template import build_claim_template
from trainium_operator.plan.manifests.worker_pod import compute_template_hash
from trainium_operator.plan.model.actions import ApplyObject, CreatePod, DeleteTemplate
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.devices import DevicesView, DeviceTaint
from trainium_operator.plan.model.observed import ApiState, JobView, Observed, PodPhase

SPEC = build.spec(workers={"accelerator": {"device": "cpu", "claim": {"count": 16}}})


def template_name() -> str:
    template = build_claim_template(build.job(SPEC))
    assert template is not None
    name: str = template["metadata"]["name"]
    return name


def plan_claims(observed: Observed, state: ApiState = ApiState.READY) -> PlanResult:
    return make_plan(observed, replace(SETTINGS, dra=state))


def condition_of(result: PlanResult, kind: ConditionType) -> tuple[str, str, str]:
    condition = find_condition(result.status, kind)
    assert condition is not None
    return condition.status.value, condition.reason, condition.message


def job_with_devices(taints: dict[int, str] | None = None, **changes: Any) -> Observed:
    """Return four workers and a spare that hold devices; `taints` maps ordinals to effects."""
    job_spec = build.spec(workers={"spares": 1, "accelerator": {"device": "cpu", "claim": {"count": 16}}})
    notes = {
        f"uid-{ordinal}": (DeviceTaint(f"node-{ordinal}/neurondevice3", "neuron.aws.com/x", effect),)
        for ordinal, effect in (taints or {}).items()
    }
    pods = tuple(build.pod(ordinal, claim_template=template_name()) for ordinal in range(5))
    devices = DevicesView(templates={template_name(): "t-uid"}, taints=notes)
    return build.running_job(4, spares=1, job_spec=job_spec, pods=pods, devices=devices, **changes)


def test_the_template_is_made_before_the_pods_that_refer_to_it() -> None:
    result = plan_claims(build.observation(build.job(SPEC), devices=DevicesView()))
    kinds = [type(action) for action in result.actions]
    applied = [action.manifest for action in result.actions_of_type(ApplyObject)]
    assert [manifest["kind"] for manifest in applied] == ["ResourceClaimTemplate"]
    assert kinds.index(ApplyObject) < kinds.index(CreatePod)


def test_a_template_that_is_there_is_not_written_again() -> None:
    assert (
        plan_claims(build.observation(build.job(SPEC), devices=DevicesView(templates={template_name(): "u"})))
        .actions[0]
        .__class__
        is CreatePod
    )


def test_an_outdated_template_is_deleted_without_referring_pods() -> None:
    both = DevicesView(templates={template_name(): "u", "demo-devices-old": "old-uid"})
    observed = replace(job_with_devices(), devices=both)
    assert DeleteTemplate("demo-devices-old", "old-uid") in plan_claims(observed).actions
    kept = build.with_pod(observed, build.pod(4, claim_template="demo-devices-old"))
    assert plan_claims(kept).actions_of_type(DeleteTemplate) == []


def test_with_fields_of_a_newer_version_a_template_is_made_and_none_removed() -> None:
    observed = build.observation(
        build.job(SPEC, unknown=("spec.new",)), devices=DevicesView(templates={"demo-devices-newer": "u"})
    )
    actions = plan_claims(observed).actions
    assert any(
        isinstance(action, ApplyObject) and action.manifest["metadata"]["name"] == template_name() for action in actions
    )
    assert not any(isinstance(action, DeleteTemplate) for action in actions)


def test_the_template_of_a_job_without_claims_is_deleted() -> None:
    observed = build.observation(build.job(build.spec()), devices=DevicesView(templates={template_name(): "u"}))
    assert DeleteTemplate(template_name(), "u") in plan_claims(observed).actions


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        (ApiState.OFF, "DeviceApiMissing", "install the chart with dra.enabled=true"),
        (ApiState.ABSENT, "DeviceApiMissing", "does not serve resource.k8s.io/v1"),
        (ApiState.READING, "WaitingForDevices", "are being read"),
    ],
)
def test_a_job_that_cannot_claim_waits_and_reports_the_reason(state: ApiState, reason: str, words: str) -> None:
    result = plan_claims(build.observation(build.job(SPEC)), state)
    assert result.created_pods == []
    for kind in (ConditionType.ADMITTED, ConditionType.PODS_READY):
        status, why, message = condition_of(result, kind)
        assert (status, why) == ("False", reason)
        assert words in message


@pytest.mark.parametrize("state", list(ApiState))
def test_a_job_without_a_claim_does_not_wait(state: ApiState) -> None:
    assert len(plan_claims(build.observation(build.job(build.spec())), state).created_pods) == 4


def test_a_running_job_continues_without_the_claim_api() -> None:
    result = plan_claims(replace(job_with_devices(), devices=None), ApiState.ABSENT)
    assert (result.created_pods, result.deleted_pods, result.status.phase) == ([], {}, Phase.RUNNING)


def test_a_member_whose_device_is_tainted_hands_its_rank_to_a_spare_before_it_is_evicted() -> None:
    result = plan_claims(job_with_devices({1: "NoExecute"}))
    entry = result.newest_entry
    assert (entry.cause, entry.node) == (Cause.DEVICE_TAINTED, "node-1")
    assert "device taint neuron.aws.com/x (NoExecute, device node-1/neurondevice3)" in entry.message
    assert result.status.failures == ()
    assert result.status.avoided_nodes == ()


def test_a_new_worker_may_come_back_to_other_devices_of_the_same_node() -> None:
    observed = job_with_devices({1: "NoExecute"})
    result = plan_claims(replace(observed, pods=observed.pods[:4]))  # without its spare, so pods are made
    manifests = result.created_manifests
    assert manifests
    assert not any("nodeAffinity" in manifest["spec"]["affinity"] for manifest in manifests)


@pytest.mark.parametrize("effect", ["NoSchedule", "None"])
def test_a_device_taint_without_eviction_replaces_nobody(effect: str) -> None:
    result = plan_claims(job_with_devices({1: effect}))
    assert result.status.history == ()
    healthy = find_condition(result.status, ConditionType.NODES_HEALTHY)
    assert healthy is not None
    assert healthy.status.value == ("False" if effect == "NoSchedule" else "True")


def test_an_eviction_for_a_tainted_device_has_a_separate_cause() -> None:
    evicted = build.pod(
        1, claim_template=template_name(), deleting=True, disrupted=True, disruption="DeletionByDeviceTaintManager"
    )
    result = plan_claims(build.with_pod(job_with_devices({1: "NoExecute"}), evicted))
    assert result.newest_entry.cause is Cause.DEVICE_TAINTED
    assert result.newest_entry.message == (
        "pod demo-w-1 on node node-1 is being deleted or evicted: "
        "device taint neuron.aws.com/x (NoExecute, device node-1/neurondevice3)"
    )
    assert result.status.failures == ()
    plain = replace(evicted, disruption="EvictionByEvictionAPI")
    assert plan_claims(build.with_pod(job_with_devices(), plain)).newest_entry.cause is Cause.PREEMPTED


def test_an_unhealthy_device_replaces_the_worker_and_avoids_the_node() -> None:
    ill = build.pod(
        1, claim_template=template_name(), device_health=("Unhealthy", "neuron.aws.com/node-1/neurondevice3: HBM")
    )
    result = plan_claims(build.with_pod(job_with_devices(), ill))
    assert result.newest_entry.cause is Cause.DEVICE
    assert "claim health (Unhealthy, neuron.aws.com/node-1/neurondevice3: HBM)" in result.newest_entry.message
    assert result.status.avoided_nodes == ("node-1",)


def test_an_unschedulable_pod_reports_nodes_with_free_devices() -> None:
    waiting = build.pod(
        0,
        phase=PodPhase.PENDING,
        node="",
        unschedulable_message="0/3 nodes are available: 2 cannot allocate all claims.",
    )
    devices = DevicesView(templates={template_name(): "u"}, free_nodes=("a",), nodes=3)
    result = plan_claims(build.observation(build.job(SPEC), (waiting,), {}, devices=devices, nodes={}))
    _, reason, message = condition_of(result, ConditionType.PODS_READY)
    assert reason == "Unschedulable"
    assert "2 cannot allocate all claims. Nodes that have 16 free devices: 1 of 3." in message


def test_missing_device_plugin_capacity_is_ignored_for_claims() -> None:
    job_spec = build.spec(
        workers={"accelerator": {"instanceType": "trn1.32xlarge", "claim": {}}}, trainer={"batch": {"globalSize": 128}}
    )
    observed = build.running_job(
        4, job_spec=job_spec, devices=DevicesView(templates={"x": "u"}), agents={4: build.agent(4)}
    )
    nodes = {
        name: replace(
            view, capacity={"aws.amazon.com/neuron": 3}, labels={"node.kubernetes.io/instance-type": "trn1.32xlarge"}
        )
        for name, view in observed.nodes.items()
    }
    assert condition_of(plan_claims(replace(observed, nodes=nodes)), ConditionType.NODES_HEALTHY)[0] == "True"
    plain = build.running_job(
        4,
        job_spec=build.spec(
            workers={"accelerator": {"instanceType": "trn1.32xlarge"}}, trainer={"batch": {"globalSize": 128}}
        ),
    )
    assert condition_of(plan_claims(replace(plain, nodes=nodes)), ConditionType.NODES_HEALTHY)[0] == "False"


def job_with_claim(claim: dict[str, Any] | None = None, instance: str = "trn1.32xlarge", **accelerator: Any) -> JobView:
    given = {"instanceType": instance, "claim": claim or {}, **accelerator}
    return build.job(build.spec(workers={"accelerator": given}, trainer={"batch": {"globalSize": 128}}))


def claimed_devices(view: JobView) -> Any:
    template = build_claim_template(view)
    assert template is not None
    return template["spec"]["spec"]["devices"]


@pytest.mark.parametrize(
    ("accelerator", "digest"),
    [
        ({"device": "cpu"}, "7c8515525a00b167"),
        ({"instanceType": "trn1.32xlarge"}, "6b0cf1ed934c870b"),
        (
            {"instanceType": "trn2.48xlarge", "resources": {"aws.amazon.com/neuron": "8"}, "coresPerNode": 32},
            "d3a5668bc976849a",
        ),
        ({"instanceType": "trn1.2xlarge"}, "2a3a5c2668723d15"),
    ],
)
def test_a_job_without_a_claim_keeps_its_template_hash(accelerator: dict[str, Any], digest: str) -> None:
    view = build.job(build.spec(workers={"accelerator": accelerator}, trainer={"batch": {"globalSize": 128}}))
    assert compute_template_hash(view, SETTINGS) == digest
    assert build_claim_template(view) is None


def test_a_worker_claims_all_devices_of_its_instance_type_by_count() -> None:
    exactly = {"deviceClassName": "neuron.aws.com", "allocationMode": "ExactCount", "count": 16}
    assert claimed_devices(job_with_claim()) == {"requests": [{"name": "neuron", "exactly": exactly}]}


def test_a_pod_refers_to_the_template_and_asks_the_device_plugin_for_nothing_but_efa() -> None:
    view = job_with_claim()
    manifest, template = worker_pod(view), build_claim_template(view)
    assert template is not None
    assert manifest["spec"]["resourceClaims"] == [
        {"name": "neuron", "resourceClaimTemplateName": template["metadata"]["name"]}
    ]
    worker = container(manifest)
    efa = {"vpc.amazonaws.com/efa": "8"}
    requests = {name: amount for name, amount in worker["resources"]["requests"].items() if "/" in name}
    assert requests == worker["resources"]["limits"] == efa
    assert worker["resources"]["claims"] == [{"name": "neuron"}]
    assert environment(manifest)["TRAINIUM_NEURON_DEVICES"] == "16"
    assert "affinity" not in manifest["spec"], "the devices alone keep two workers from one node"


def test_an_init_container_that_compiles_sees_the_claimed_devices_too() -> None:
    view = job_with_claim()
    view = build.job(build.spec(**{**view.spec.to_wire(), "precompile": {"enabled": True}}))
    (init,) = worker_pod(view)["spec"]["initContainers"]
    assert init["resources"]["claims"] == [{"name": "neuron"}]


def test_fewer_devices_are_connected_on_request_and_workers_keep_to_one_a_node() -> None:
    view = job_with_claim({"count": 4, "connected": True}, coresPerNode=8)
    assert claimed_devices(view)["constraints"] == [
        {"requests": ["neuron"], "matchAttribute": "resource.aws.com/devicegroup4_id"}
    ]
    manifest = worker_pod(view)
    assert environment(manifest)["TRAINIUM_NEURON_DEVICES"] == "4"
    assert "podAntiAffinity" in manifest["spec"]["affinity"]


def test_the_size_of_a_logical_core_is_passed_to_the_driver_and_to_the_runtime() -> None:
    view = job_with_claim({"logicalNeuronCore": 1}, "trn2.48xlarge", coresPerNode=128)
    parameters = {"apiVersion": "neuron.aws.com/v1", "kind": "NeuronConfig", "logicalNeuronCore": 1}
    assert claimed_devices(view)["config"] == [
        {"requests": ["neuron"], "opaque": {"driver": "neuron.aws.com", "parameters": parameters}}
    ]
    assert environment(worker_pod(view))["NEURON_LOGICAL_NC_CONFIG"] == "1"
    assert "NEURON_LOGICAL_NC_CONFIG" not in environment(worker_pod(job_with_claim()))


def test_further_conditions_go_into_the_request() -> None:
    pinned = "device.attributes['neuron.aws.com'].neuronDriverVersion == '2.31.7'"
    (request,) = claimed_devices(job_with_claim({"selectors": [pinned]}))["requests"]
    assert request["exactly"]["selectors"] == [{"cel": {"expression": pinned}}]


def test_the_name_of_a_template_follows_from_its_content_and_it_belongs_to_the_job() -> None:
    template, same, other = (
        build_claim_template(job_with_claim(claim)) for claim in ({}, {"count": 16}, {"connected": True})
    )
    assert template is not None
    assert same is not None
    assert other is not None
    assert template["metadata"]["name"] == same["metadata"]["name"] != other["metadata"]["name"]
    assert template["metadata"]["name"].startswith("demo-devices-")
    assert template["metadata"]["ownerReferences"][0]["uid"] == "job-uid"
    assert template["metadata"]["ownerReferences"][0]["controller"] is True


def test_claims_of_the_template_are_kept() -> None:
    theirs = {
        "spec": {
            "resourceClaims": [{"name": "fabric", "resourceClaimTemplateName": "efa"}],
            "containers": [{"resources": {"claims": [{"name": "fabric"}]}}],
        }
    }
    view = job_with_claim()
    view = build.job(
        build.spec(workers={**view.spec.workers.to_wire(), "template": theirs}, trainer={"batch": {"globalSize": 128}})
    )
    manifest = worker_pod(view)
    assert [claim["name"] for claim in manifest["spec"]["resourceClaims"]] == ["neuron", "fabric"]
    assert container(manifest)["resources"]["claims"] == [{"name": "neuron"}, {"name": "fabric"}]
