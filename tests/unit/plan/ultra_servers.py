"""A fake cluster of UltraServers, whose scheduler follows the pods' required affinity."""

from typing import Any

from tests.unit.plan import plan_builders as build
from tests.unit.plan.fake_data_plane import Pod
from tests.unit.plan.plan_cluster import FakeCluster
from trainium_contract.accelerators import ULTRA_SERVER_LABEL, ULTRA_SERVER_NODE_LABEL
from trainium_contract.job import TrainingJobSpec
from trainium_operator.plan.model.observed import NodeView

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


class UltraServerCluster(FakeCluster):
    """One TrainingJob on UltraServers; the nodes of one do not follow each other by name."""

    def __init__(self, spec: TrainingJobSpec, servers: int, nodes: int = 4) -> None:
        super().__init__(spec, servers * nodes)
        self.unit_nodes = nodes
        self.topology_key = ULTRA_SERVER_LABEL.format(nodes)
        for number, node in enumerate(self.nodes.values()):
            node.view = NodeView(name=node.name, labels=self.label_node(number % servers, number // servers))

    def label_node(self, server: int, number: int) -> dict[str, str]:
        """Return the labels of a node of an UltraServer, as the device plugin sets them."""
        index = str(self.unit_nodes - 1 - number)  # in no order of the names
        return {self.topology_key: f"server{server}", ULTRA_SERVER_NODE_LABEL.format(self.unit_nodes): index}

    def server_of(self, node: str) -> str:
        view = self.nodes[node].view if node in self.nodes else None
        return view.labels[self.topology_key] if view is not None else ""

    def member_servers(self) -> list[str]:
        """Return the UltraServer of each rank."""
        assert self.membership is not None
        return [self.server_of(member.node_name) for member in self.membership.members]

    def nodes_of(self, server: str) -> list[str]:
        return [name for name in self.nodes if self.server_of(name) == server]

    def delete_pod(self, name: str) -> None:
        """Delete a pod, as a user does."""
        self._delete(name, self.pods[name].view.uid, None)
        self.dirty = True

    def _meets_affinity(self, pod: Pod, node: str) -> bool:
        affinity = pod.manifest["spec"].get("affinity") or {}
        attracted = all(
            self._is_near(term, node, pod) for term in (affinity.get("podAffinity") or {}).get(_REQUIRED, ())
        )
        repelled = any(self._is_near(term, node) for term in (affinity.get("podAntiAffinity") or {}).get(_REQUIRED, ()))
        return attracted and not repelled

    def _is_near(self, term: dict[str, Any], node: str, pod: Pod | None = None) -> bool:
        """Return whether a pod that the term selects is in the node's domain.

        As kube-scheduler: the first pod that selects itself may be anywhere.
        """
        if term["topologyKey"] != self.topology_key:
            return pod is not None  # other terms are not followed here
        selected = [other for other in self.pods.values() if other.view.node and _is_selected(term, other)]
        if not selected and pod is not None:
            return _is_selected(term, pod)
        return any(self.server_of(other.view.node) == self.server_of(node) for other in selected)

    def check(self) -> None:
        """Assert also that each block of ranks is one UltraServer, and that only whole ones train."""
        super().check()
        if self.membership is None or not self.status.membership.size:
            return
        assert len(self.membership.members) % self.unit_nodes == 0
        servers = {
            block: {self.server_of(member.node_name) for member in self.membership.members[first : first + 4]} - {""}
            for block, first in enumerate(range(0, len(self.membership.members), self.unit_nodes))
        }
        assert all(len(names) <= 1 for names in servers.values()), f"a unit is on several UltraServers: {servers}"


def _is_selected(term: dict[str, Any], pod: Pod) -> bool:
    labels, selector = pod.manifest["metadata"]["labels"], term["labelSelector"]
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(each["key"]) not in each["values"] for each in selector.get("matchExpressions", ())
    )


def build_spec(replicas: int = 8, **workers: Any) -> TrainingJobSpec:
    """Return a job on UltraServers of four nodes that trains at 4, 8 and 12."""
    accelerator = {
        "device": "cpu",
        "unit": "UltraServer",
        "unitNodes": 4,
        "unitTopologyKey": ULTRA_SERVER_LABEL.format(4),
    }
    return build.spec(
        workers={"replicas": replicas, "accelerator": accelerator, **workers},
        trainer={"steps": 10**6, "batch": {"globalSize": 96}},
        recovery={"rescaleAfterSeconds": 30, "budgets": {"infrastructure": {"maxFailures": 500}}},
    )
