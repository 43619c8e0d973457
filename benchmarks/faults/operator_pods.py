"""Control the replicas of the operator: their number, their nodes, and their leader."""

from __future__ import annotations

import contextlib
import urllib.request
from typing import TYPE_CHECKING, Any

from tests.testing.cluster.installed import NAMESPACE, RELEASE
from tests.testing.suite import timeouts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testing.cluster.shared_cluster import SharedCluster

Json = dict[str, Any]
_DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{RELEASE}"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class OperatorPods:
    """Controls the replicas of the operator on a cluster; each call returns when its change is complete."""

    def __init__(self, cluster: SharedCluster) -> None:
        self._cluster = cluster
        self._api = cluster.api

    def list_pods(self) -> list[Json]:
        """Return the pods of the operator that are not terminating."""
        items = self._api.get(_PODS)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def scale(self, replicas: int) -> None:
        """Change the number of replicas and wait until they are ready."""
        self._api.patch(f"{_DEPLOYMENT}/scale", {"spec": {"replicas": replicas}})

        def is_scaled() -> bool:
            pods = self._api.get(_PODS)["items"]
            ready = self._api.get(_DEPLOYMENT)["status"].get("readyReplicas", 0)
            return bool(len(pods) == ready == replicas)

        timeouts.until(is_scaled, f"the operator has {replicas} replicas", pause=0.2)

    @contextlib.contextmanager
    def run_on_nodes(self, nodes: list[str], replicas: int = 2) -> Iterator[None]:
        """Run replicas on as many of these nodes, with all agents connected; afterwards one, on its previous node."""
        previous_selector = self._api.get(_DEPLOYMENT)["spec"]["template"]["spec"].get("nodeSelector")
        rule = "requiredDuringSchedulingIgnoredDuringExecution"
        node_term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": nodes}]}

        def update_deployment(replicas: int, selector: Json | None, term: Json | None) -> None:
            pod = {"nodeSelector": selector, "affinity": {"nodeAffinity": {rule: term}}}
            self._api.patch(_DEPLOYMENT, {"spec": {"replicas": replicas, "template": {"spec": pod}}})
            self._wait_for_rollout(120)

        update_deployment(replicas, None, {"nodeSelectorTerms": [node_term]})
        try:
            self._wait_for_agents()
            yield
        finally:
            update_deployment(1, previous_selector, None)

    def find_leader_node(self) -> str:
        """Return the node of the leader."""
        return str(self._find_leader_pod()["spec"]["nodeName"])

    def _find_leader_pod(self) -> Json:
        leader = self.read_leader()
        pods = [pod for pod in self.list_pods() if pod["metadata"]["name"] in leader]
        if not pods:
            raise TimeoutError(f"{leader or 'no replica'} leads, but has no pod")
        return pods[0]

    def read_leader(self) -> str:
        """Return the identity of the holder of the Lease."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{RELEASE}"
        holder: str = self._api.get(path)["spec"].get("holderIdentity") or ""
        return holder

    def wait_until_stable(self, seconds: float) -> None:
        """Wait until only the newest pods are left and all agents are connected to the leader."""
        self._wait_for_rollout(seconds)
        self._wait_for_agents()

    def _wait_for_rollout(self, seconds: float) -> None:
        limit = f"--timeout={timeouts.scaled(seconds):.0f}s"
        deployment = ("-n", NAMESPACE, f"deployment/{RELEASE}")
        self._cluster.kubectl("rollout", "status", *deployment, limit, seconds=seconds + 10)

    def _wait_for_agents(self) -> None:
        """Wait until every worker has registered: the new leader cannot detect the failure of an agent it never saw."""
        workers = self._api.get("/api/v1/pods?labelSelector=trainium.dev/role%3Dworker")["items"]
        running = sum(pod["status"].get("phase") == "Running" for pod in workers)

        def are_registered() -> bool:
            with contextlib.suppress(TimeoutError):
                text = self._read_metrics(self._find_leader_pod())
                lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
                return bool(float(lines["trainingjob_operator_agents"]) >= running)
            return False

        timeouts.until(are_registered, f"{running} agents register with the new operator", pause=0.2)

    def _read_metrics(self, pod: Json) -> str:
        if self._cluster.devcluster is not None:
            # An API server does not proxy to loopback, on which pods of the development cluster listen.
            with urllib.request.urlopen(
                f"http://{pod['status']['podIP']}:8080/metrics", timeout=timeouts.scaled(5)
            ) as response:
                return str(response.read().decode())
        path = f"{_PODS}/{pod['metadata']['name']}:8080/proxy/metrics"
        return self._cluster.kubectl("get", "--raw", path)

    def kill(self) -> None:
        """Delete the pods without a grace period; their Deployment creates new ones."""
        for pod in self.list_pods():
            name = pod["metadata"]["name"]
            self._api.delete(f"{_PODS}/{name}", {"gracePeriodSeconds": 0})
