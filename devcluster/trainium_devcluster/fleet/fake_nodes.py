"""Create any number of fake nodes, whose kubelets kwok simulates, beside the nodes that run processes.

The control plane, the scheduling and the objects are real. No process runs in the pods; `benchmarks/fleet` has
simulated agents. Nodes are registered complete and Ready; kwok renews their leases. A fault takes effect before its
method returns.
"""

from __future__ import annotations

import copy
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainium_contract.rfc3339 import format_rfc3339
from trainium_devcluster.binaries import FLEET_PROGRAMS, Program, ensure_binaries
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_devcluster.handle import ClusterHandle
    from trainium_devcluster.progress import ReportProgress

MAX_NODES = 10_000
MANAGED_LABEL = "trainium.dev/fleet"
"""Label of nodes whose kubelet kwok simulates (kwok.yaml, node.yaml); a node without it has a dead kubelet."""
_MAX_CONCURRENT_REQUESTS = 8
_READY_SECONDS = 300.0
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_ZONES = ("us-west-2a", "us-west-2b", "us-west-2c", "us-west-2d")
_NODE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("node.yaml").read_text())
_INITIAL_TAINTS = ("not-ready", "unreachable", "network-unavailable")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """The properties that each node of a fleet reports."""

    neuron: int = 16
    efa: int = 8
    cpu: str = "128"
    memory: str = "512Gi"
    instance_type: str = "trn1.32xlarge"
    lease_seconds: int = 40
    """Duration of a lease, by default a kubelet's; a longer one saves writes of the API server on a small machine."""
    nodes_per_spine: int = 64
    """Nodes below one switch of network layer 2; a quarter of them share a switch of layer 3."""


class KwokFleet:
    """The fake nodes of one cluster."""

    def __init__(self, cluster: ClusterHandle, shape: FleetShape) -> None:
        self._cluster = cluster
        self.shape = shape
        self.nodes: list[str] = []
        self._count = 0  # of nodes so far, including deleted ones

    @classmethod
    def create(
        cls, cluster: ClusterHandle, nodes: int, shape: FleetShape | None = None, *, report: ReportProgress
    ) -> KwokFleet:
        """Register `nodes` nodes and return when each can run a worker; raises ClusterError."""
        if not 0 <= nodes <= MAX_NODES:
            raise ClusterError(f"A fleet cannot have {nodes} nodes; use 0 to {MAX_NODES}.")
        fleet = cls(cluster, shape or FleetShape())
        program = ensure_binaries(programs=FLEET_PROGRAMS, report=report).find_path(Program.KWOK)
        configuration = cluster.paths.root / "kwok.yaml"
        configuration.write_text(_configure_kwok(fleet.shape.lease_seconds))
        report(f"registering {nodes} fake nodes")
        fleet.add(nodes)
        cluster.request_supervisor({"op": "start-fleet", "program": str(program), "configuration": str(configuration)})
        fleet.wait_ready()
        return fleet

    def add(self, count: int) -> list[str]:
        """Register more nodes and return their names; numbers are never reused."""
        names = [f"fleet-{number:05d}" for number in range(self._count + 1, self._count + count + 1)]
        self._count += count
        bodies = (self._build_node(name) for name in names)
        with ThreadPoolExecutor(_MAX_CONCURRENT_REQUESTS) as threads:
            list(threads.map(lambda body: self._cluster.api.create("/api/v1/nodes", body, exists_ok=True), bodies))
        self.nodes += names
        return names

    def wait_ready(self, seconds: float = _READY_SECONDS) -> None:
        """Wait until every node is schedulable and kwok holds its lease."""
        deadline = time.monotonic() + seconds
        expected = set(self.nodes)
        while True:
            registered = {item["metadata"]["name"]: item for item in self._list("/api/v1/nodes")}
            not_ready = [name for name in expected & registered.keys() if _has_initial_taints(registered[name])]
            leases = {item["metadata"]["name"] for item in self._list(_LEASES)}
            not_ready += expected & registered.keys() - leases
            if not not_ready:
                return
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{len(not_ready)} of {len(expected)} fake nodes are not ready after {seconds:.0f} s, "
                    f"{min(not_ready)} among them; the log of kwok is {self._cluster.paths.logs / 'kwok.log'}."
                )
            time.sleep(0.2 + len(expected) / 2000)

    # --- faults ------------------------------------------------------------------------------------------------------

    def fail_pod(self, namespace: str, pod: str, *, exit_code: int = 1, message: str = "") -> None:
        """End the pod's containers with an exit code, permanently."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        current = self._cluster.api.get(path)
        terminated = {"exitCode": exit_code, "reason": "Error", "message": message, "finishedAt": format_now()}
        containers = [
            {"name": container["name"], "image": container["image"], "imageID": "", "ready": False, "restartCount": 0}
            | {"state": {"terminated": terminated}}
            for container in current["spec"]["containers"]
        ]
        conditions = [item for item in current["status"].get("conditions", []) if item["type"] != "Ready"]
        conditions.append(
            {"type": "Ready", "status": "False", "reason": "PodFailed", "lastTransitionTime": format_now()}
        )
        status = {"phase": "Failed", "containerStatuses": containers, "conditions": conditions}
        self._cluster.api.patch(f"{path}/status", {"status": status})

    def stop_kubelet(self, node: str) -> None:
        """Stop the kubelet: no lease, no status of its pods; after the grace period the node is NotReady."""
        self._cluster.api.patch(self._format_path(node), {"metadata": {"labels": {MANAGED_LABEL: None}}})

    def delete_node(self, node: str) -> None:
        """Delete the Node object, as a cloud controller does when the machine is terminated; permanent."""
        self._cluster.api.delete(self._format_path(node), missing_ok=False)
        self.nodes = [name for name in self.nodes if name != node]

    def set_condition(self, node: str, kind: str, status: str, *, reason: str = "Fault") -> None:
        """Set a condition of the node, including `Ready`; `status` is True, False or Unknown."""
        conditions = self._cluster.api.get(self._format_path(node))["status"].get("conditions", [])
        others = [item for item in conditions if item["type"] != kind]
        others.append(
            {"type": kind, "status": status, "reason": reason, "message": ""}
            | {"lastTransitionTime": format_now(), "lastHeartbeatTime": format_now()}
        )
        self._cluster.api.patch(f"{self._format_path(node)}/status", {"status": {"conditions": others}})

    # --- parts -------------------------------------------------------------------------------------------------------

    def _build_node(self, name: str) -> dict[str, Any]:
        shape, number = self.shape, int(name.rpartition("-")[2])
        digest = hashlib.sha256(f"{self._cluster.name}/{name}".encode()).hexdigest()
        zone = _ZONES[(number - 1) // (4 * shape.nodes_per_spine) % len(_ZONES)]
        spine, leaf = (number - 1) // shape.nodes_per_spine, (number - 1) // max(1, shape.nodes_per_spine // 4)
        devices = {"aws.amazon.com/neuron": str(shape.neuron), "vpc.amazonaws.com/efa": str(shape.efa)}
        capacity = {"cpu": shape.cpu, "memory": shape.memory, "pods": "110", "ephemeral-storage": "500Gi", **devices}
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        node = copy.deepcopy(_NODE)
        node["metadata"]["name"] = name
        node["metadata"]["labels"] |= {
            "kubernetes.io/hostname": name,
            "node.kubernetes.io/instance-type": shape.instance_type,
            "topology.kubernetes.io/zone": zone,
            "topology.k8s.aws/network-node-layer-1": f"nn-{zone}",
            "topology.k8s.aws/network-node-layer-2": f"nn-spine-{spine}",
            "topology.k8s.aws/network-node-layer-3": f"nn-leaf-{leaf}",
        }
        node["spec"]["providerID"] = f"aws:///{zone}/i-{digest[:17]}"
        addresses = [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}]
        node["status"] |= {"capacity": capacity, "allocatable": capacity, "addresses": addresses}
        for condition in node["status"]["conditions"]:
            condition |= {"lastTransitionTime": format_now(), "lastHeartbeatTime": format_now()}
        return node

    def _format_path(self, node: str) -> str:
        return f"/api/v1/nodes/{node}"

    def _list(self, path: str) -> list[dict[str, Any]]:
        """List objects from the API server's cache."""
        items: list[dict[str, Any]] = self._cluster.api.get(f"{path}?resourceVersion=0").get("items", [])
        return items


def _configure_kwok(lease_seconds: int) -> str:
    """Return the configuration of kwok; leases expire after `lease_seconds` and are renewed four times as often."""
    options, *stages = yaml.safe_load_all(Path(__file__).with_name("kwok.yaml").read_text())
    options["options"]["nodeLeaseDurationSeconds"] = lease_seconds
    return yaml.safe_dump_all([options, *stages], sort_keys=False)


def _has_initial_taints(node: Mapping[str, Any]) -> bool:
    """Return whether the node still has the initial taints of the control plane."""
    keys = {taint["key"] for taint in node["spec"].get("taints", [])}
    return any(f"node.kubernetes.io/{unset}" in keys for unset in _INITIAL_TAINTS)


def format_now() -> str:
    """Return the current time in the API's format."""
    return format_rfc3339(time.time())
