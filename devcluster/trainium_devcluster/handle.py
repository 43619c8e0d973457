"""Access a running cluster: its files, its API server and its supervisor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trainium_devcluster.control_socket import request
from trainium_devcluster.controlplane import components
from trainium_devcluster.controlplane.components import Component, Ports
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_devcluster.api_client import ApiClient
    from trainium_devcluster.state import ClusterPaths

_READY_SECONDS = 60.0


class ClusterHandle:
    """Gives faults, fleets of fake nodes and Kueue access to a cluster."""

    def __init__(self, paths: ClusterPaths) -> None:
        self.paths = paths
        self._api: ApiClient | None = None

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.paths.name

    @property
    def ports(self) -> Ports:
        """The ports of the components."""
        return Ports.from_json(self.paths.endpoints.read_text())

    @property
    def api(self) -> ApiClient:
        """A client of the API server with the administrator's rights."""
        if self._api is None:
            self._api = components.create_admin_client(self.paths, self.ports.apiserver)
        return self._api

    def request_supervisor(self, message: Mapping[str, Any], timeout: float = 60.0) -> dict[str, Any]:
        """Send a request to the supervisor and return its response."""
        return request(self.paths.control_socket, message, timeout)

    def read_status(self) -> dict[str, Any]:
        """Return the supervisor's view: components, nodes, pids, memory in bytes."""
        return self.request_supervisor({"op": "status"})

    def check_node(self, node: str) -> None:
        """Raise ClusterError unless the cluster has this node."""
        nodes = self.read_status()["nodes"]
        if node not in nodes:
            raise ClusterError(
                f"Cluster {self.name!r} has no node {node!r}; its nodes: {', '.join(sorted(nodes)) or 'none'}."
            )

    def wait_for_component(self, component: Component) -> None:
        """Wait until a component is ready."""
        deadline = time.monotonic() + _READY_SECONDS
        while not components.is_ready(component, self.paths, self.ports):
            if time.monotonic() > deadline:
                log = self.paths.logs / f"{component}.log"
                raise ClusterError(f"{component} is not ready after {_READY_SECONDS:.0f} s; its log is {log}.")
            time.sleep(0.05)
