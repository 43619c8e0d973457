"""Where the scheduler places two replicas of the operator with the chart's default values."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.definition.conftest import Api
from tests.cluster.definition.rendered_chart import render_chart
from tests.testing.suite.timeouts import scaled, until
from trainium_contract.accelerators import INSTANCES

pytestmark = pytest.mark.cluster

NAMESPACE = "placement-tests"
LABEL = "placement-tests"


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    if api.is_existing:
        pytest.skip("nodes without a kubelet would stay in an existing cluster's scheduler")
    api.make_namespaces(NAMESPACE)
    yield NAMESPACE
    api.delete_namespaces(NAMESPACE)
    api.run("kubectl", "delete", "nodes", "--selector", LABEL)


def create_node(api: Api, name: str, instance_type: str, group: str) -> None:
    """Create a ready node without a kubelet; the node controller leaves it ready for 40 s."""
    labels = {LABEL: group, "kubernetes.io/hostname": name, "node.kubernetes.io/instance-type": instance_type}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    api.kubectl("create", "-f", "-", stdin=json.dumps(node))
    # The scheduler prefers the node with more capacity, which is the one without Trainium.
    capacity = {"cpu": "200m", "memory": "400Mi"} if instance_type in INSTANCES else {"cpu": "8", "memory": "32Gi"}
    capacity |= {"pods": "20"}
    status = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": capacity, "capacity": capacity}
    api.kubectl("patch", "node", name, "--subresource=status", "--patch", json.dumps({"status": status}))


def place_replicas(api: Api, namespace: str, group: str, nodes: dict[str, str]) -> list[str]:
    """Return the nodes of two pods of the chart's Deployment, given these nodes and their instance types."""
    for name, instance_type in nodes.items():
        create_node(api, name, instance_type, group)

    def is_tolerated() -> bool:
        listed = json.loads(api.kubectl("get", "nodes", "--selector", f"{LABEL}={group}", "--output=json"))["items"]
        return not any(node["spec"].get("taints") for node in listed)

    until(is_tolerated, "the nodes have no taint", scaled(20))
    template = render_chart(api).pod
    labels = template["metadata"]["labels"] | {"pod-template-hash": group}
    spec = template["spec"] | {"nodeSelector": {LABEL: group}}
    del spec["serviceAccountName"]
    for number in range(2):
        metadata = {"name": f"{group}-{number}", "namespace": namespace, "labels": labels}
        pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        api.run("kubectl", "create", "serviceaccount", "default", "--namespace", namespace)
        assert api.refusal(pod, "--namespace", namespace) == ""

    def find_nodes() -> list[str]:
        listed = json.loads(api.kubectl("get", "pods", "--namespace", namespace, "--output=json"))["items"]
        placed = [pod for pod in listed if pod["metadata"]["labels"].get("pod-template-hash") == group]
        return sorted(pod["spec"].get("nodeName", "") for pod in placed)

    until(lambda: all(find_nodes()), "both pods have a node", scaled(20))
    return find_nodes()


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param(
            {"plain": "m7i.large", "trainium": "trn1.32xlarge"}, ["plain", "trainium"], id="one node without Trainium"
        ),
        pytest.param({"only": "trn1.32xlarge"}, ["only", "only"], id="one node"),
    ],
)
def test_replicas_are_on_different_nodes_where_there_are_two(
    api: Api, namespace: str, nodes: dict[str, str], expected: list[str]
) -> None:
    assert place_replicas(api, namespace, expected[0], nodes) == expected
