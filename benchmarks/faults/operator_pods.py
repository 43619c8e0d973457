"""The operator that the rows play with: its pods, how many there are and where, and which of them leads.

Invariant: replicas that were asked for are there, and those that were not are gone, when a call returns.
"""

from __future__ import annotations

import contextlib
import urllib.request
from typing import TYPE_CHECKING, Any

from tests.testing.cluster.installed import NAMESPACE, RELEASE
from tests.testing.suite import patience

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.faults.api import Api
    from tests.testing.cluster.sites import Site

Json = dict[str, Any]
_DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{RELEASE}"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class OperatorPods:
    """On one cluster."""

    def __init__(self, site: Site, api: Api) -> None:
        self._site = site
        self._api = api

    def pods(self) -> list[Json]:
        """Pods of the operator that are not leaving."""
        items = self._api.get(_PODS)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def scale(self, replicas: int) -> None:
        """Change the number of operator replicas and wait until it is so."""
        self._api.patch(f"{_DEPLOYMENT}/scale", {"spec": {"replicas": replicas}})

        def is_so() -> bool:
            pods = self._api.get(_PODS)["items"]
            ready = self._api.get(_DEPLOYMENT)["status"].get("readyReplicas", 0)
            return bool(len(pods) == ready == replicas)

        patience.until(is_so, f"the operator has {replicas} replicas", pause=0.2)

    @contextlib.contextmanager
    def among(self, nodes: list[str]) -> Iterator[None]:
        """Two replicas on two of these nodes, and every agent heard; afterwards one, where it was."""
        home = self._api.get(_DEPLOYMENT)["spec"]["template"]["spec"].get("nodeSelector")
        rule = "requiredDuringSchedulingIgnoredDuringExecution"
        here = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": nodes}]}

        def place(replicas: int, selector: Json | None, term: Json | None) -> None:
            pod = {"nodeSelector": selector, "affinity": {"nodeAffinity": {rule: term}}}
            self._api.patch(_DEPLOYMENT, {"spec": {"replicas": replicas, "template": {"spec": pod}}})
            self._rolled_out(120)

        place(2, None, {"nodeSelectorTerms": [here]})
        try:
            self._await_agents()
            yield
        finally:
            place(1, home, None)

    def leader_node(self) -> str:
        """Node of the replica that leads."""
        return str(self._leader_pod()["spec"]["nodeName"])

    def _leader_pod(self) -> Json:
        leader = self.leader()
        found = [pod for pod in self.pods() if pod["metadata"]["name"] in leader]
        if not found:
            raise TimeoutError(f"{leader or 'nobody'} leads, which is no pod that is there")
        return found[0]

    def leader(self) -> str:
        """Identity of the operator that holds the Lease."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{RELEASE}"
        holder: str = self._api.get(path)["spec"].get("holderIdentity") or ""
        return holder

    def settle(self, seconds: float) -> None:
        """Until the newest pods are the only ones and have heard every agent."""
        self._rolled_out(seconds)
        self._await_agents()

    def _rolled_out(self, seconds: float) -> None:
        limit = f"--timeout={patience.patient(seconds):.0f}s"
        deployment = ("-n", NAMESPACE, f"deployment/{RELEASE}")
        self._site.kubectl("rollout", "status", *deployment, limit, seconds=seconds + 10)

    def _await_agents(self) -> None:
        """Until every worker has registered with the operator: one that it never heard is not silent to it."""
        workers = self._api.get("/api/v1/pods?labelSelector=trainium.dev/role%3Dworker")["items"]
        wanted = sum(pod["status"].get("phase") == "Running" for pod in workers)

        def are_there() -> bool:
            with contextlib.suppress(TimeoutError):
                text = self._metrics_of(self._leader_pod())
                lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
                return bool(float(lines["trainingjob_operator_agents"]) >= wanted)
            return False

        patience.until(are_there, f"{wanted} agents register with the new operator", pause=0.2)

    def _metrics_of(self, pod: Json) -> str:
        if self._site.cluster is not None:
            # An API server passes nothing on to loopback, where pods of the development cluster are.
            with urllib.request.urlopen(
                f"http://{pod['status']['podIP']}:8080/metrics", timeout=patience.patient(5)
            ) as answer:
                return str(answer.read().decode())
        path = f"{_PODS}/{pod['metadata']['name']}:8080/proxy/metrics"
        return self._site.kubectl("get", "--raw", path)

    def kill(self) -> None:
        """The operator's pods are gone at once; their Deployment makes new ones."""
        for pod in self.pods():
            name = pod["metadata"]["name"]
            self._api.delete(f"{_PODS}/{name}", {"gracePeriodSeconds": 0})
