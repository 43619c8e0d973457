"""Inject faults for tests and users: power loss, hung machines, network partitions, bad devices.

Guarantees:
- A fault acts at once and is not reported to Kubernetes: the cluster detects it by its own means (missing Leases, exit
  codes, conditions).
- Every fault except a kill can be reverted.
"""

from __future__ import annotations

import signal as signals
from typing import TYPE_CHECKING, Any

from trainium_devcluster.control_socket import request
from trainium_devcluster.controlplane.components import Component
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_devcluster.handle import ClusterHandle

_STOP_SECONDS = 20.0


class Faults:
    """The fault controls of one running cluster."""

    def __init__(self, cluster: ClusterHandle) -> None:
        self._cluster = cluster

    # --- whole nodes -------------------------------------------------------------------------------------------------

    def kill_node(self, node: str) -> None:
        """Cut the power of a node: its runtime and every process of its pods end at once."""
        self._cluster.request_supervisor({"op": "kill-node", "node": node})

    def start_node(self, node: str) -> None:
        """Power on after `kill_node`: the same node returns, without its containers."""
        self._cluster.request_supervisor({"op": "start-node", "node": node})

    def freeze_node(self, node: str) -> None:
        """Freeze every process of a node; its connections stay open."""
        self._cluster.request_supervisor({"op": "freeze-node", "node": node})

    def thaw_node(self, node: str) -> None:
        """Let a frozen node continue."""
        self._cluster.request_supervisor({"op": "thaw-node", "node": node})

    def slow_node(self, node: str, share: float = 0.25) -> None:
        """Limit the containers of a node to this share of the time; 1 is full speed."""
        if not 0 < share <= 1:
            raise ClusterError(f"A node cannot run {share:g} of the time; give a share above 0 and up to 1.")
        self._send_to_node(node, {"op": "slow", "factor": share})

    def partition_node(self, node: str) -> None:
        """Partition a node: it continues to run, but has no connection to or from the API server."""
        self._send_to_node(node, {"op": "partition", "on": True})

    def heal_node(self, node: str) -> None:
        """Revert `partition_node`."""
        self._send_to_node(node, {"op": "partition", "on": False})

    def set_condition(self, node: str, kind: str, status: str, reason: str, message: str = "") -> None:
        """Set a condition of the Node object, as a health monitor does; it stays until `clear_condition`."""
        if status not in {"True", "False", "Unknown"}:
            raise ClusterError(f"The status of a condition is True, False or Unknown, not {status!r}.")
        fields = {"type": kind, "status": status, "reason": reason, "message": message}
        self._send_to_node(node, {"op": "set-condition", **fields})

    def clear_condition(self, node: str, kind: str) -> None:
        """Clear a condition that `set_condition` set."""
        self._send_to_node(node, {"op": "clear-condition", "type": kind})

    # --- processes of a pod ------------------------------------------------------------------------------------------

    def kill_container(
        self,
        namespace: str,
        pod: str,
        container: str | None = None,
        *,
        signal: int = signals.SIGKILL,
        match: str | None = None,
    ) -> None:
        """Signal a container's main process, or its first process whose command line matches a regular expression."""
        self._send_to_container("kill-container", namespace, pod, container, signal=int(signal), match=match)

    def freeze_container(self, namespace: str, pod: str, container: str | None = None) -> None:
        """Freeze all processes of a container."""
        self._send_to_container("freeze-container", namespace, pod, container)

    def thaw_container(self, namespace: str, pod: str, container: str | None = None) -> None:
        """Let a frozen container continue."""
        self._send_to_container("thaw-container", namespace, pod, container)

    # --- control plane -----------------------------------------------------------------------------------------------

    def stop(self, component: Component, *, seconds: float = _STOP_SECONDS) -> None:
        """Stop a component, gracefully for up to `seconds`, and do not restart it; 0 kills it."""
        self._cluster.request_supervisor({"op": "stop-component", "component": component, "seconds": seconds})

    def start(self, *components: Component) -> None:
        """Start stopped components again, in this order, and wait until all are ready.

        etcd counts as ready when the API server has reached it.
        """
        for component in components:
            self._cluster.request_supervisor({"op": "start-component", "component": component})
        for component in components:
            self._cluster.wait_for_component(component)

    def restart_apiserver(self) -> None:
        """Restart the API server at the same address, and wait until it is ready."""
        self.stop(Component.APISERVER, seconds=0)
        self.start(Component.APISERVER)

    def _send_to_node(self, node: str, message: Mapping[str, Any]) -> dict[str, Any]:
        self._cluster.check_node(node)
        return request(self._cluster.paths.find_node_socket(node), message, timeout=30.0)

    def _send_to_container(
        self, operation: str, namespace: str, pod: str, container: str | None, **more: object
    ) -> None:
        document = self._cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        node = document.get("spec", {}).get("nodeName")
        if not node:
            raise ClusterError(f"Pod {namespace}/{pod} is not on a node yet, so it has no processes.")
        fields = {"namespace": namespace, "pod": pod, "container": container, **more}
        self._send_to_node(
            str(node), {"op": operation, **{key: value for key, value in fields.items() if value is not None}}
        )
