"""Describe what faults and fleets of fake nodes need of a running cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_devcluster.controlplane.client import ApiClient
    from trainium_devcluster.controlplane.components import Component, Ports
    from trainium_devcluster.state import ClusterPaths


class ClusterHandle(Protocol):
    """A cluster that runs: its files, its API server and its supervisor."""

    @property
    def name(self) -> str:
        """The cluster's name."""
        ...

    @property
    def paths(self) -> ClusterPaths:
        """Where its files are."""
        ...

    @property
    def ports(self) -> Ports:
        """Where its components listen."""
        ...

    @property
    def api(self) -> ApiClient:
        """A client of the API server with the administrator's rights."""
        ...

    def supervisor(self, message: Mapping[str, Any], timeout: float = 60.0) -> dict[str, Any]:
        """Send one request to the supervisor and return its answer."""
        ...

    def check_node(self, node: str) -> None:
        """Raise ClusterError unless the cluster has this node."""
        ...

    def wait_for_component(self, component: Component, seconds: float = 60.0) -> None:
        """Wait until a component is ready."""
        ...
