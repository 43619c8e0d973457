"""Pods that claim their devices, the templates that they claim by, and that all other pods are as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from plan_builders import SETTINGS, job, spec

from trainium_operator.plan.features.dra.template import claim_template
from trainium_operator.plan.manifests.worker_pod import Avoided, template_hash, worker_pods

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import JobView


def claiming(claim: dict[str, Any] | None = None, instance: str = "trn1.32xlarge", **accelerator: Any) -> JobView:
    given = {"instanceType": instance, "claim": claim or {}, **accelerator}
    return job(spec(workers={"accelerator": given}, trainer={"batch": {"globalSize": 128}}))


def made(view: JobView) -> Any:
    return worker_pods(view, SETTINGS, range(1), Avoided())[0]["spec"]


def devices(view: JobView) -> Any:
    template = claim_template(view)
    assert template is not None
    return template["spec"]["spec"]["devices"]


def environment(pod_spec: Any) -> Any:
    return {item["name"]: item.get("value") for item in pod_spec["containers"][0]["env"]}


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
def test_the_template_of_a_job_without_a_claim_is_what_it_was_before_there_were_claims_and_requests(
    accelerator: dict[str, Any], digest: str
) -> None:
    view = job(spec(workers={"accelerator": accelerator}, trainer={"batch": {"globalSize": 128}}))
    assert template_hash(view, SETTINGS) == digest
    assert claim_template(view) is None


def test_a_worker_claims_all_devices_of_its_instance_type_by_count() -> None:
    exactly = {"deviceClassName": "neuron.aws.com", "allocationMode": "ExactCount", "count": 16}
    assert devices(claiming()) == {"requests": [{"name": "neuron", "exactly": exactly}]}


def test_a_pod_refers_to_the_template_and_asks_the_device_plugin_for_nothing_but_efa() -> None:
    view = claiming()
    pod_spec, template = made(view), claim_template(view)
    assert template is not None
    assert pod_spec["resourceClaims"] == [{"name": "neuron", "resourceClaimTemplateName": template["metadata"]["name"]}]
    (container,) = pod_spec["containers"]
    efa = {"vpc.amazonaws.com/efa": "8"}
    requests = {name: amount for name, amount in container["resources"]["requests"].items() if "/" in name}
    assert requests == container["resources"]["limits"] == efa
    assert container["resources"]["claims"] == [{"name": "neuron"}]
    assert environment(pod_spec)["TRAINIUM_NEURON_DEVICES"] == "16"
    assert "affinity" not in pod_spec, "the devices alone keep two workers from one node"


def test_an_init_container_that_compiles_sees_the_claimed_devices_too() -> None:
    view = claiming()
    view = job(spec(**{**view.spec.to_wire(), "precompile": {"enabled": True}}))
    (init,) = made(view)["initContainers"]
    assert init["resources"]["claims"] == [{"name": "neuron"}]


def test_fewer_devices_are_connected_on_request_and_workers_keep_to_one_a_node() -> None:
    view = claiming({"count": 4, "connected": True}, coresPerNode=8)
    assert devices(view)["constraints"] == [
        {"requests": ["neuron"], "matchAttribute": "resource.aws.com/devicegroup4_id"}
    ]
    pod_spec = made(view)
    assert environment(pod_spec)["TRAINIUM_NEURON_DEVICES"] == "4"
    assert "podAntiAffinity" in pod_spec["affinity"]


def test_the_size_of_a_logical_core_is_passed_to_the_driver_and_to_the_runtime() -> None:
    view = claiming({"logicalNeuronCore": 1}, "trn2.48xlarge", coresPerNode=128)
    parameters = {"apiVersion": "neuron.aws.com/v1", "kind": "NeuronConfig", "logicalNeuronCore": 1}
    assert devices(view)["config"] == [
        {"requests": ["neuron"], "opaque": {"driver": "neuron.aws.com", "parameters": parameters}}
    ]
    assert environment(made(view))["NEURON_LOGICAL_NC_CONFIG"] == "1"
    assert "NEURON_LOGICAL_NC_CONFIG" not in environment(made(claiming()))


def test_a_node_of_an_ultraserver_is_one_device() -> None:
    view = claiming({"ultraServerNode": True}, "trn2u.48xlarge")
    (request,) = devices(view)["requests"]
    assert request["exactly"]["count"] == 1
    (selector,) = request["exactly"]["selectors"]
    assert selector["cel"]["expression"] == "device.attributes['neuron.aws.com'].resourceType == 'neuron_node'"
    (config,) = devices(view)["config"]
    assert config["opaque"]["parameters"]["kind"] == "UltraServerConfig"
    assert config["opaque"]["parameters"]["ultraserverMode"] == 1
    assert environment(made(view))["TRAINIUM_NEURON_DEVICES"] == "16"


def test_further_conditions_go_into_the_request() -> None:
    pinned = "device.attributes['neuron.aws.com'].neuronDriverVersion == '2.31.7'"
    (request,) = devices(claiming({"selectors": [pinned]}))["requests"]
    assert request["exactly"]["selectors"] == [{"cel": {"expression": pinned}}]


def test_the_name_of_a_template_follows_from_its_content_and_it_belongs_to_the_job() -> None:
    one, same, other = (claim_template(claiming(claim)) for claim in ({}, {"count": 16}, {"connected": True}))
    assert one is not None
    assert same is not None
    assert other is not None
    assert one["metadata"]["name"] == same["metadata"]["name"] != other["metadata"]["name"]
    assert one["metadata"]["name"].startswith("demo-devices-")
    assert one["metadata"]["ownerReferences"][0]["uid"] == "job-uid"
    assert one["metadata"]["ownerReferences"][0]["controller"] is True


def test_claims_of_the_users_template_are_beside_ours() -> None:
    theirs = {
        "spec": {
            "resourceClaims": [{"name": "fabric", "resourceClaimTemplateName": "efa"}],
            "containers": [{"resources": {"claims": [{"name": "fabric"}]}}],
        }
    }
    view = claiming()
    view = job(
        spec(workers={**view.spec.workers.to_wire(), "template": theirs}, trainer={"batch": {"globalSize": 128}})
    )
    pod_spec = made(view)
    assert [each["name"] for each in pod_spec["resourceClaims"]] == ["neuron", "fabric"]
    assert pod_spec["containers"][0]["resources"]["claims"] == [{"name": "neuron"}, {"name": "fabric"}]
