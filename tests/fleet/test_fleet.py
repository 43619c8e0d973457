"""Fake nodes on a real control plane, and the parts of the fleet benchmark at a size at which they are a test."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testing.suite.timeouts import USUAL, scaled, until
from trainium_devcluster.binaries import FLEET_PROGRAMS, is_cached
from trainium_devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(240)]


def get_pod(cluster: Cluster, name: str) -> dict[str, Any]:
    return cluster.api.get(f"/api/v1/namespaces/default/pods/{name}")


def test_a_fleet_node_has_the_capacity_of_a_trainium_node(cluster: Cluster) -> None:
    node = cluster.api.get("/api/v1/nodes/fleet-00001")
    assert node["status"]["allocatable"]["aws.amazon.com/neuron"] == "16"
    assert node["status"]["allocatable"]["vpc.amazonaws.com/efa"] == "8"
    assert node["spec"]["providerID"].startswith("aws:///us-west-2a/i-")
    assert node["metadata"]["labels"]["topology.k8s.aws/network-node-layer-3"] == "nn-leaf-0"


def test_pods_of_a_fleet_node_run_and_fail_on_request(cluster: Cluster) -> None:
    assert cluster.fleet is not None
    cluster.kubectl("run", "plain", "--image=none", "--restart=Never")
    status = until(
        lambda: (found := get_pod(cluster, "plain")["status"])["phase"] == "Running" and found, "the pod runs"
    )
    assert status["podIP"].startswith("10.")
    cluster.fleet.fail_pod("default", "plain", exit_code=7, message="boom")
    failed = get_pod(cluster, "plain")["status"]
    assert failed["phase"] == "Failed"
    assert failed["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 7
    cluster.kubectl("delete", "pod", "plain", "--wait", f"--timeout={scaled(30):.0f}s")


def test_conditions_and_removed_devices_stay(cluster: Cluster) -> None:
    assert cluster.fleet is not None
    node = cluster.fleet.nodes[-1]
    cluster.fleet.set_condition(node, "NeuronHealth", "True", reason="NeuronHasError")
    set_devices(cluster, node, "15")
    time.sleep(1.0)
    status = cluster.api.get(f"/api/v1/nodes/{node}")["status"]
    assert [condition["status"] for condition in status["conditions"] if condition["type"] == "NeuronHealth"] == [
        "True"
    ]
    assert status["allocatable"]["aws.amazon.com/neuron"] == "15"
    cluster.fleet.set_condition(node, "NeuronHealth", "False")
    set_devices(cluster, node, "16")


def set_devices(cluster: Cluster, node: str, count: str) -> None:
    devices = {"aws.amazon.com/neuron": count}
    cluster.api.patch(f"/api/v1/nodes/{node}/status", {"status": {"allocatable": devices, "capacity": devices}})


def test_the_operator_replaces_a_failed_worker_of_a_fleet_by_the_spare(cluster: Cluster, tmp_path: Path) -> None:
    generations = asyncio.run(_one_fault(cluster, tmp_path))
    assert generations == [1, 2]


async def _one_fault(cluster: Cluster, folder: Path) -> list[int]:
    """Start a job of four nodes and a spare with simulated agents, fail one pod; return the common generations."""
    from benchmarks.fleet.agents_process import AgentsProcess
    from benchmarks.fleet.job import JOBS, NAME, build_training_job, read_recorded_membership, wait_for_status
    from benchmarks.fleet.kube import PodWatch, create_admin_client
    from benchmarks.fleet.operator_process import SERVER_NAME, ChartInstallation
    from trainium_contract.wire.worker_env import LABEL_JOB

    assert cluster.fleet is not None
    async with create_admin_client(cluster) as kube:
        chart = ChartInstallation(cluster, folder)
        await chart.install(kube)
        operator = await chart.start()
        try:
            await operator.wait_until_leading()
            async with (
                PodWatch(kube, f"{LABEL_JOB}={NAME}") as watch,
                AgentsProcess(cluster, NAME, addresses=[(operator.host, operator.port)], name=SERVER_NAME) as agents,
            ):
                await kube.create(JOBS, build_training_job(4, spares=1))
                await watch.wait_until_running(5, scaled(USUAL))
                await agents.request("start")
                first = await agents.request("wait_for_membership", generation=1, count=4, seconds=scaled(USUAL))
                await wait_for_status(kube, lambda status: status.get("phase") == "Running", "it trains", scaled(USUAL))
                member = (await read_recorded_membership(kube)).members[1].pod_name
                await asyncio.to_thread(cluster.fleet.fail_pod, "default", member, exit_code=137)
                second = await agents.request("wait_for_membership", generation=2, count=4, seconds=scaled(USUAL))
                await watch.wait_until(lambda: watch.created == 6, "a new spare is made", scaled(USUAL))
                await wait_for_status(kube, lambda status: status.get("spares", 0) == 1, "it is warm", scaled(USUAL))
        finally:
            await operator.stop()
        return [first["newest"], second["newest"]]


TOPOLOGY_KEY = "topology.k8s.aws/ultraserver-id"
SELECTED = {"test": "ultra-servers"}


def test_the_scheduler_keeps_each_unit_on_a_separate_ultra_server(cluster: Cluster, tmp_path: Path) -> None:
    """Four UltraServers of two nodes, one with a cordoned node: three units are placed, whichever it tries first."""
    assert cluster.fleet is not None
    servers = {node: f"server-{number % 4}" for number, node in enumerate(cluster.fleet.add(8))}
    for node, server in servers.items():
        cluster.kubectl(
            "label", "node", node, f"{TOPOLOGY_KEY}={server}", *(f"{key}={value}" for key, value in SELECTED.items())
        )
    cordoned = next(iter(servers))
    cluster.kubectl("cordon", cordoned)
    units = asyncio.run(_place_units(cluster, tmp_path))
    assert sorted(len(nodes) for nodes in units.values()) == [2, 2, 2]
    used = [{servers[node] for node in nodes} for nodes in units.values()]
    assert all(len(each) == 1 for each in used), units
    assert set().union(*used) == {*servers.values()} - {servers[cordoned]}


async def _place_units(cluster: Cluster, folder: Path) -> dict[str, set[str]]:
    """Run the operator until all pods of a job of three UltraServers have nodes; return the nodes by unit."""
    from benchmarks.fleet.job import JOBS, build_training_job
    from benchmarks.fleet.kube import create_admin_client, delete
    from benchmarks.fleet.operator_process import ChartInstallation
    from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_UNIT

    job = build_training_job(4, spares=2)
    job["metadata"]["name"] = "servers"
    job["spec"]["workers"] |= {
        "accelerator": {
            "resources": {"aws.amazon.com/neuron": "16"},
            "coresPerNode": 32,
            "unit": "UltraServer",
            "unitNodes": 2,
            "unitTopologyKey": TOPOLOGY_KEY,
        },
        "template": {"spec": {"nodeSelector": SELECTED}},
    }
    async with create_admin_client(cluster) as kube:
        chart = ChartInstallation(cluster, folder)
        await chart.install(kube)
        operator = await chart.start()
        try:
            await operator.wait_until_leading()
            await kube.create(JOBS, job)
            deadline = time.monotonic() + scaled(USUAL)
            while True:
                pods = await kube.get(f"/api/v1/namespaces/default/pods?labelSelector={LABEL_JOB}%3Dservers")
                units: dict[str, set[str]] = {}
                for pod in pods["items"]:
                    if pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]:
                        units.setdefault(pod["metadata"]["labels"][LABEL_UNIT], set()).add(pod["spec"]["nodeName"])
                if sorted(map(len, units.values())) == [2, 2, 2] and len(pods["items"]) == 6:
                    return units
                assert time.monotonic() < deadline, f"not placed: {units}"
                await asyncio.sleep(0.2)
        finally:
            await delete(kube, f"{JOBS}/servers")
            await operator.stop()


NODES = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if not is_cached(FLEET_PROGRAMS):
        pytest.skip("kwok is not built; `trainium-devcluster binaries --fleet` builds it once, in a minute or two")
    with Cluster.start(fleet=NODES, apiserver_args=("--disable-admission-plugins=TaintNodesByCondition",)) as cluster:
        yield cluster
