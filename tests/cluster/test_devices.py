"""Jobs that claim their devices, with the real machinery of Kubernetes: claims made by the controller-manager, devices
allocated by the scheduler, pods evicted for tainted devices.

It has its own control plane, because its ResourceSlices are the cluster's. There is no driver: the test publishes what
one would, for each node the devices of a trn1.32xlarge, and the workers compute on processors.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testing.cluster.access import ROOT
from tests.testing.cluster.installed import install_operator
from tests.testing.cluster.jobs import Job
from tests.testing.cluster.shared_cluster import SharedCluster
from tests.testing.suite.timeouts import until
from trainium_devcluster.cluster import Cluster, create_node_specs, create_system_node, create_system_values

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

DRIVER = "neuron.aws.com"
DEVICES = 16
CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": DRIVER},
    "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
}
CLAIMING = "{workers: {accelerator: {device: cpu, claim: {count: 16, connected: true}}}}"
ENDLESS = "{trainer: {steps: 100000}, workers: {accelerator: {device: cpu, claim: {count: 16, connected: true}}}}"
PACED = {
    "TRAINIUM_RANK_ENTRY": "trainium_paced:main",
    "TRAINIUM_TEST_PACE": "0.2",
    "PYTHONPATH": str(next((ROOT / "tests").rglob("trainium_paced.py")).parent),
}
"""A job that waits for a fault takes no more of the processors than it needs to have steps."""
SHARED = "{trainer: {steps: 100000}, workers: {replicas: 1, accelerator: {device: cpu, claim: {count: 8}}}}"


def build_resource_slice(node: str, taints: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the ResourceSlice that the driver of a node publishes; `taints`: device -> effect of its taint."""
    devices: list[dict[str, Any]] = []
    for number in range(DEVICES):
        attributes = {
            "deviceId": {"int": number},
            "instanceType": {"string": "trn1.32xlarge"},
            "resourceType": {"string": "neuron_device"},
            "resource.aws.com/devicegroup16_id": {"string": f"all-of-{node}"},
        }
        device = {"name": f"neurondevice{number}", "attributes": attributes}
        if effect := (taints or {}).get(device["name"]):
            device["taints"] = [{"key": "neuron.aws.com/unhealthy", "value": "HBM", "effect": effect}]
        devices.append(device)
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-neuron"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[SharedCluster]:
    if request.config.getoption("--cluster") != "local":
        pytest.skip("writes ResourceSlices, which belong to a driver elsewhere")
    nodes = create_node_specs(3, cpu="4", memory="8Gi")
    with (
        tempfile.TemporaryDirectory(prefix="trainium-devices-") as folder,
        Cluster.start(nodes=[*nodes, create_system_node()]) as devcluster,
    ):
        found = SharedCluster("local", devcluster.list_variables(), Path(folder), {}, devcluster)
        slices = [build_resource_slice(node.name) for node in nodes]
        everything = {"apiVersion": "v1", "kind": "List", "items": [CLASS, *slices]}
        found.kubectl("apply", "-f", "-", stdin=json.dumps(everything))
        install_operator(found, {"statusIntervalSeconds": 1, "dra": {"enabled": True}} | create_system_values())
        yield found


def claims(job: Job) -> dict[str, list[tuple[str, str]]]:
    """Return, by pod of the job, pool and device of all that its claim holds."""
    found = {}
    for claim in job.cluster.get("resourceclaims", "-n", job.namespace)["items"]:
        (owner,) = claim["metadata"]["ownerReferences"]
        if not owner["name"].startswith(f"{job.name}-w-"):
            continue
        allocation = (claim.get("status") or {}).get("allocation") or {"devices": {}}
        results = allocation["devices"].get("results") or []
        found[owner["name"]] = [(result["pool"], result["device"]) for result in results]
    return found


def templates(job: Job) -> list[str]:
    items = job.cluster.get("resourceclaimtemplates", "-n", job.namespace, "-l", f"trainium.dev/job-name={job.name}")
    return sorted(item["metadata"]["name"] for item in items["items"])


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(
        (condition for condition in status.get("conditions") or () if condition["type"] == kind),
        {"status": "", "message": ""},
    )


def taint(cluster: SharedCluster, node: str, **taints: str) -> None:
    """Taint devices of a node as its driver does, or remove the taints."""
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(build_resource_slice(node, taints)))


def end(job: Job) -> None:
    job.delete()
    until(lambda: not claims(job), "the devices are released")


def test_a_job_trains_on_its_allocated_devices(cluster: SharedCluster) -> None:
    job = Job(cluster, "default", "claims", CLAIMING).apply()
    job.wait_for_step(5)
    allocated = claims(job)
    pods = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in job.list_pods()}
    assert allocated.keys() == pods.keys()
    for pod, node in pods.items():
        assert sorted(allocated[pod]) == sorted((node, f"neurondevice{number}") for number in range(DEVICES))
    (template,) = templates(job)
    spec = cluster.get("resourceclaimtemplate", template, "-n", "default")["spec"]["spec"]["devices"]
    assert spec["requests"][0]["exactly"]["count"] == DEVICES
    assert spec["constraints"] == [{"requests": ["neuron"], "matchAttribute": "resource.aws.com/devicegroup16_id"}]
    job.wait_for_phase("Completed")
    end(job)


def test_a_worker_with_a_tainted_device_moves_to_another_node_without_blame(
    cluster: SharedCluster,
) -> None:
    job = Job(cluster, "default", "tainted", ENDLESS, environment=PACED).apply()
    job.wait_for_step(10)
    victim = job.list_members()[1]
    before = victim["nodeName"]
    taint(cluster, before, neurondevice3="NoExecute")

    entry = job.wait_for_recovery(seconds=120)

    assert (entry["cause"], entry["stepsLost"]) == ("DeviceTainted", 0)
    assert before not in {member["nodeName"] for member in job.list_members()}
    status = job.read_status()
    assert status.get("failures") in (None, []), "a taint counts as no failure"
    assert status.get("avoidedNodes") in (None, [])
    assert all(pool != before for devices in claims(job).values() for pool, _ in devices)
    taint(cluster, before)
    end(job)


def test_a_worker_of_some_devices_moves_to_others_of_its_node(cluster: SharedCluster) -> None:
    """Two nodes are cordoned by taints of all their devices, so only the other half of the same node is left."""
    job = Job(cluster, "default", "half", SHARED).apply()
    job.wait_for_step(5)
    (node,) = {member["nodeName"] for member in job.list_members()}
    others = [item["spec"]["nodeName"] for item in cluster.get("resourceslices")["items"]]
    for other in set(others) - {node}:
        taint(cluster, other, **{f"neurondevice{number}": "NoSchedule" for number in range(DEVICES)})
    (allocated,) = claims(job).values()
    taint(cluster, node, **{allocated[0][1]: "NoExecute"})

    entry = job.wait_for_recovery(seconds=120)

    assert entry["cause"] == "DeviceTainted"
    (after,) = [devices for devices in claims(job).values() if devices]
    assert {pool for pool, _ in after} == {node}
    assert allocated[0] not in after
    for other in others:
        taint(cluster, other)
    end(job)


def test_free_nodes_are_counted_by_their_devices(cluster: SharedCluster) -> None:
    first = Job(cluster, "default", "first", ENDLESS).apply()
    first.wait_for_step(3)
    second = Job(cluster, "default", "second", ENDLESS).apply()

    def message(status: dict[str, Any]) -> str:
        text: str = condition(status, "PodsReady")["message"]
        return text

    status = second.wait_until("a count of free nodes", lambda status: "16 free devices: 0 of 3" in message(status), 60)
    assert "cannot be scheduled" in message(status)
    end(first)
    second.wait_for_step(3)
    end(second)


def test_a_changed_claim_replaces_its_template(cluster: SharedCluster) -> None:
    job = Job(cluster, "default", "shape", ENDLESS).apply()
    job.wait_for_step(3)
    (old,) = templates(job)
    job.suspend()
    job.wait_for_phase("Suspended")
    change = {"spec": {"workers": {"accelerator": {"claim": {"connected": False}}}}}
    job.cluster.kubectl("patch", "trainingjob", job.name, "-n", "default", "--type=merge", "-p", json.dumps(change))
    until(lambda: len(templates(job)) == 1 and old not in templates(job), "the old one is removed")
    job.suspend(yes=False)
    job.wait_for_step(job.log.newest + 3)
    end(job)


def test_a_foreign_template_is_unchanged_and_reported(cluster: SharedCluster) -> None:
    job = Job(cluster, "default", "foreign", ENDLESS).apply()
    job.wait_for_step(2)
    (name,) = templates(job)
    mine = cluster.get("resourceclaimtemplate", name, "-n", "default")
    end(job)
    until(lambda: not templates(job), "it went with its job")
    metadata = {"name": name, "namespace": "default", "labels": mine["metadata"]["labels"]}
    foreign = {**mine, "metadata": metadata}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(foreign))
    again = Job(cluster, "default", "foreign", ENDLESS).apply()
    status = again.wait_until(
        "its name is taken", lambda status: condition(status, "PodsReady").get("reason") == "NameTaken", 60
    )
    assert (
        f"ResourceClaimTemplate {name} exists and does not belong to this job"
        in condition(status, "PodsReady")["message"]
    )
    assert again.list_pods() == []
    cluster.kubectl("delete", "resourceclaimtemplate", name, "-n", "default")
    again.wait_for_phase("Running")
    end(again)
