"""Injected faults: their effects on nodes and pods, and their repair."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testing.suite.processes import has_ended, process_state
from tests.testing.suite.timeouts import scaled, until
from trainium_devcluster.cluster import Cluster, create_node_specs
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.processes.process_tree import find_marked, read_command_line
from trainium_devcluster.state import MARKER, NodeSpec

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

GRACE_SECONDS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        with Cluster.start(nodes=create_node_specs(2), node_monitor_grace_seconds=GRACE_SECONDS) as cluster:
            yield cluster


@pytest.fixture
def pod(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """Start a pod named like the test on node-1, whose shell has two children."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:50].strip("-")
    container = {"name": "main", "image": "any", "command": ["sh", "-c", "sleep 901 & exec sleep 902"]}
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "nodeName": "node-1",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }
    cluster.wait_for_nodes(["node-1"])
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={scaled(30):.0f}s")
    yield name
    cluster.faults.thaw_node("node-1")  # else a failed test would make the next ones fail
    cluster.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found")


def processes(cluster: Cluster, text: str) -> list[int]:
    """Return the pids of living processes on node-1 whose command line has a text."""
    pids = find_marked(MARKER, cluster.paths.format_marker("node-1"))
    return [pid for pid in pids if text in read_command_line(pid) and not has_ended(pid)]


def phase(cluster: Cluster, pod: str) -> str:
    return cluster.kubectl("get", "pod", pod, "-o", "jsonpath={.status.phase}")


def conditions(cluster: Cluster, node: str) -> dict[str, dict[str, Any]]:
    items = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
    return {item["type"]: item for item in items}


def test_nodes_offer_their_devices(cluster: Cluster) -> None:
    allocatable = cluster.api.get("/api/v1/nodes/node-1")["status"]["allocatable"]
    assert (allocatable["aws.amazon.com/neuron"], allocatable["vpc.amazonaws.com/efa"]) == ("16", "8")


def test_a_killed_container_fails_with_the_signals_code(cluster: Cluster, pod: str) -> None:
    cluster.faults.kill_container("default", pod)
    until(lambda: phase(cluster, pod) == "Failed", "the pod fails")
    status = cluster.api.get(f"/api/v1/namespaces/default/pods/{pod}")["status"]
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
    with pytest.raises(ClusterError, match="not running"):
        cluster.faults.kill_container("default", pod)


def test_one_process_inside_a_container_is_killed_by_its_command_line(cluster: Cluster, pod: str) -> None:
    until(lambda: len(processes(cluster, "sleep 901")) == 1, "one of them is left")
    cluster.faults.kill_container("default", pod, match=r"^sleep 901")
    until(lambda: not processes(cluster, "sleep 901"), "none is left")
    assert processes(cluster, "sleep 902")
    assert phase(cluster, pod) == "Running"


def test_a_frozen_container_stalls_until_it_is_thawed(cluster: Cluster, pod: str) -> None:
    cluster.faults.freeze_container("default", pod)
    until(lambda: [process_state(pid) for pid in processes(cluster, "sleep 90")] == ["T", "T"], "both are frozen")
    cluster.faults.thaw_container("default", pod)
    until(lambda: [process_state(pid) for pid in processes(cluster, "sleep 90")] == ["S", "S"], "both run")


def test_a_condition_stays_until_it_is_cleared(cluster: Cluster) -> None:
    cluster.faults.set_condition("node-2", "NeuronFault", "True", "DeviceLost", "neuron 3 does not answer")
    until(
        lambda: conditions(cluster, "node-2").get("NeuronFault", {}).get("status") == "True",
        "the node has the condition",
    )
    assert conditions(cluster, "node-2")["NeuronFault"]["reason"] == "DeviceLost"
    cluster.faults.clear_condition("node-2", "NeuronFault")
    until(lambda: conditions(cluster, "node-2").get("NeuronFault", {}).get("status") != "True", "it is gone")
    cluster.faults.set_condition("node-2", "Ready", "False", "Injected", "bad")
    cluster.wait_for_nodes(["node-2"], ready=False)
    cluster.faults.clear_condition("node-2", "Ready")
    cluster.wait_for_nodes(["node-2"])


def test_a_frozen_node_is_not_ready_until_it_is_thawed(cluster: Cluster, pod: str) -> None:
    cluster.faults.freeze_node("node-1")
    assert all(process_state(pid) == "T" for pid in processes(cluster, "sleep 90"))
    cluster.wait_for_nodes(["node-1"], ready=False)
    cluster.faults.thaw_node("node-1")
    cluster.wait_for_nodes(["node-1"])
    assert len(processes(cluster, "sleep 90")) == 2


def test_pods_of_a_partitioned_node_continue(cluster: Cluster, pod: str) -> None:
    cluster.faults.partition_node("node-1")
    cluster.wait_for_nodes(["node-1"], ready=False)
    assert len(processes(cluster, "sleep 90")) == 2
    cluster.faults.heal_node("node-1")
    cluster.wait_for_nodes(["node-1"])


def test_a_restarted_node_has_no_pods(cluster: Cluster, pod: str) -> None:
    cluster.faults.kill_node("node-1")
    assert not find_marked(MARKER, cluster.paths.format_marker("node-1"))
    assert cluster.read_status()["nodes"]["node-1"]["state"] == "dead"
    assert phase(cluster, pod) == "Running"  # the API server has not been notified
    cluster.wait_for_nodes(["node-1"], ready=False)
    cluster.faults.start_node("node-1")
    cluster.wait_for_nodes(["node-1"])
    until(lambda: phase(cluster, pod) == "Failed", "the pod fails")
    with pytest.raises(ClusterError, match="already runs"):
        cluster.faults.start_node("node-1")


def test_nodes_are_added_and_removed(cluster: Cluster) -> None:
    cluster.add_node(NodeSpec("late", neuron=1, labels={"zone": "b"}))
    assert cluster.api.get("/api/v1/nodes/late")["metadata"]["labels"]["zone"] == "b"
    with pytest.raises(ClusterError, match="has a node 'late' already"):
        cluster.add_node(NodeSpec("late"))
    cluster.remove_node("late")
    assert "late" not in cluster.read_node_readiness()
    assert not find_marked(MARKER, cluster.paths.format_marker("late"))


@pytest.mark.long
def test_a_stopped_cluster_ends_all_processes_of_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Cluster.start(nodes=create_node_specs(1)) as cluster:
        root = cluster.paths.root
        cluster.kubectl("run", "busy", "--image=any", "--command", "--", "sh", "-c", "trap '' TERM; sleep 903")
        cluster.kubectl("wait", "--for=condition=Ready", "pod/busy", f"--timeout={scaled(30):.0f}s")
        assert processes(cluster, "sleep 903")
    assert not find_marked(MARKER, f"{root}/", prefix=True)
    assert not root.exists()
