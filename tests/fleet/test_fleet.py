"""Fake nodes on a real control plane, and the parts of the fleet benchmark at a size at which they are a test."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.timeouts import USUAL, scaled, until

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def pod(cluster: Cluster, name: str) -> dict[str, Any]:
    return cluster.api.get(f"/api/v1/namespaces/default/pods/{name}")


def test_a_node_of_a_fleet_claims_what_a_trainium_node_has(cluster: Cluster) -> None:
    node = cluster.api.get("/api/v1/nodes/fleet-00001")
    assert node["status"]["allocatable"]["aws.amazon.com/neuron"] == "16"
    assert node["status"]["allocatable"]["vpc.amazonaws.com/efa"] == "8"
    assert node["spec"]["providerID"].startswith("aws:///us-west-2a/i-")
    assert node["metadata"]["labels"]["topology.k8s.aws/network-node-layer-3"] == "nn-leaf-0"


def test_its_pods_run_at_once_and_fail_on_request(cluster: Cluster) -> None:
    assert cluster.fleet is not None
    cluster.kubectl("run", "plain", "--image=none", "--restart=Never")
    status = until(lambda: (found := pod(cluster, "plain")["status"])["phase"] == "Running" and found, "the pod runs")
    assert status["podIP"].startswith("10.")
    cluster.fleet.fail_pod("default", "plain", exit_code=7, message="boom")
    failed = pod(cluster, "plain")["status"]
    assert failed["phase"] == "Failed"
    assert failed["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 7
    cluster.kubectl("delete", "pod", "plain", "--wait", f"--timeout={scaled(30):.0f}s")


def test_a_condition_stays_and_a_device_that_vanished_is_missing(cluster: Cluster) -> None:
    assert cluster.fleet is not None
    node = cluster.fleet.nodes[-1]
    cluster.fleet.set_condition(node, "NeuronHealth", "True", reason="NeuronHasError")
    cluster.fleet.set_allocatable(node, "aws.amazon.com/neuron", 15)
    time.sleep(1.0)
    status = cluster.api.get(f"/api/v1/nodes/{node}")["status"]
    assert [each["status"] for each in status["conditions"] if each["type"] == "NeuronHealth"] == ["True"]
    assert status["allocatable"]["aws.amazon.com/neuron"] == "15"
    cluster.fleet.set_condition(node, "NeuronHealth", "False")
    cluster.fleet.set_allocatable(node, "aws.amazon.com/neuron", 16)


@pytest.mark.long
def test_the_operator_trains_a_fleet_and_replaces_a_failed_worker_by_the_spare(
    cluster: Cluster, tmp_path: Path
) -> None:
    generations = asyncio.run(_one_fault(cluster, tmp_path))
    assert generations == [1, 2]


async def _one_fault(cluster: Cluster, folder: Path) -> list[int]:
    """Start a job of four nodes and a spare with simulated agents, fail one pod; return the common generations."""
    from benchmarks.fleet.agents_process import AgentsProcess
    from benchmarks.fleet.job import NAME, training_job
    from benchmarks.fleet.kube import PodWatch, administrator
    from benchmarks.fleet.operator_process import SERVER_NAME, ChartInstallation
    from benchmarks.fleet.scenario import JOBS, membership, until_status
    from trainium_contract.wire.worker_env import LABEL_JOB

    assert cluster.fleet is not None
    async with administrator(cluster) as kube:
        chart = ChartInstallation(cluster, folder)
        await chart.install(kube)
        operator = await chart.start()
        try:
            await operator.until_leader()
            async with (
                PodWatch(kube, f"{LABEL_JOB}={NAME}") as watch,
                AgentsProcess(cluster, NAME, addresses=[(operator.host, operator.port)], name=SERVER_NAME) as agents,
            ):
                await kube.create(JOBS, training_job(4, spares=1))
                await watch.until_running(5, scaled(USUAL))
                await agents.ask("start")
                first = await agents.ask("learned", generation=1, count=4, seconds=scaled(USUAL))
                await until_status(kube, lambda status: status.get("phase") == "Running", scaled(USUAL), "it trains")
                member = (await membership(kube)).members[1].pod_name
                await asyncio.to_thread(cluster.fleet.fail_pod, "default", member, exit_code=137)
                second = await agents.ask("learned", generation=2, count=4, seconds=scaled(USUAL))
                await watch.until(lambda: watch.created == 6, scaled(USUAL), "a new spare is made")
                await until_status(kube, lambda status: status.get("spares", 0) == 1, scaled(USUAL), "it is warm")
        finally:
            await operator.stop()
        return [first["newest"], second["newest"]]
