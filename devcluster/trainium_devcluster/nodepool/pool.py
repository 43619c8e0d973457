"""Start, stop and freeze the node processes of a cluster, and clean up after them.

Guarantees:
- When a node's process has ended in any way, all processes that ran on it end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_devcluster.controlplane import components
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.node.options import NodeOptions
from trainium_devcluster.nodepool.unresponsive_ports import UnresponsivePorts, find_listening_addresses
from trainium_devcluster.processes.cleanup import remove_folder
from trainium_devcluster.processes.process_tree import freeze_tree, kill_tree, thaw_tree
from trainium_devcluster.state import MARKER, NodeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainium_devcluster.controlplane.components import Ports
    from trainium_devcluster.processes.children import Child, Children
    from trainium_devcluster.state import ClusterPaths

_PORT_HOLD_ATTEMPTS = 50
_PORT_HOLD_INTERVAL_SECONDS = 0.02
"""Interval of attempts to hold the ports of a killed node, because its pods' last processes may still be ending."""
logger = logging.getLogger(__name__)


class NodeState(StrEnum):
    """The states of a node's process."""

    RUNNING = "running"
    FROZEN = "frozen"
    STOPPING = "stopping"
    DEAD = "dead"


@dataclass(slots=True)
class PoolNode:
    """A node: its options and its process."""

    spec: NodeSpec
    child: Child
    state: NodeState = NodeState.RUNNING
    unresponsive_ports: UnresponsivePorts | None = None
    """The held ports of the node while it has no power."""


class NodePool:
    """Starts and ends the nodes of one cluster."""

    def __init__(
        self,
        paths: ClusterPaths,
        ports: Ports,
        children: Children,
        *,
        binaries: Path,
        venv_bin: Path,
        heartbeat_seconds: float,
        kubernetes: str,
    ) -> None:
        self._paths = paths
        self._ports = ports
        self._children = children
        self._binaries = binaries
        self._venv_bin = venv_bin
        self._heartbeat_seconds = heartbeat_seconds
        self._kubernetes = kubernetes
        self._nodes: dict[str, PoolNode] = {}

    def add(self, spec: NodeSpec) -> None:
        """Start a new node; raises ClusterError if the name exists."""
        if spec.name in self._nodes:
            raise ClusterError(f"Cluster {self._paths.name!r} has a node {spec.name!r} already; choose another name.")
        self._start(spec)

    def start(self, name: str) -> None:
        """Restart a node that was killed or has ended."""
        node = self._get(name)
        if node.child.code is None:
            raise ClusterError(f"Node {name!r} already runs.")
        self._release_ports(node)
        self._start(node.spec)

    async def kill(self, name: str) -> None:
        """Simulate a power loss."""
        node = self._get(name)
        ports = [] if node.unresponsive_ports else find_listening_addresses(MARKER, self._paths.format_marker(name))
        self._kill(node)
        await node.child.ended.wait()
        node.unresponsive_ports = node.unresponsive_ports or UnresponsivePorts(ports)
        for _ in range(_PORT_HOLD_ATTEMPTS):
            if not node.unresponsive_ports.missing:
                break
            await asyncio.sleep(_PORT_HOLD_INTERVAL_SECONDS)
            node.unresponsive_ports.retry()

    async def stop(self, name: str, seconds: float) -> None:
        """Shut down gracefully for up to `seconds`, then by force."""
        node = self._get(name)
        self._request_stop(node)
        await node.child.wait(seconds)
        self._kill(node)
        await node.child.ended.wait()

    async def remove(self, name: str) -> None:
        """Kill a node and remove its name and its files, as a machine that is removed permanently loses its disk."""
        await self.kill(name)
        self._release_ports(self._nodes[name])
        del self._nodes[name]
        await asyncio.to_thread(remove_folder, self._paths.find_node_folder(name))

    def freeze(self, name: str) -> None:
        """Freeze every process of the node."""
        node = self._get(name)
        pid = node.child.pid
        if pid is None:
            raise ClusterError(f"Node {name!r} is not running, so it cannot be frozen.")
        freeze_tree(pid, MARKER, self._paths.format_marker(name))
        node.state = NodeState.FROZEN

    def thaw(self, name: str) -> None:
        """Let a frozen node continue; no effect on one that is not frozen."""
        self._thaw(self._get(name))

    async def stop_all(self, seconds: float) -> None:
        """Stop all nodes, gracefully (they unmount and clean up) for up to `seconds`."""
        for node in self._nodes.values():
            self._request_stop(node)
        await asyncio.gather(*(node.child.wait(seconds) for node in self._nodes.values()))
        for node in self._nodes.values():
            self._kill(node)

    def read_status(self) -> dict[str, dict[str, object]]:
        """Return the part of `status` about the nodes."""
        return {name: node.child.build_status_row(node.state) for name, node in self._nodes.items()}

    def _start(self, spec: NodeSpec) -> None:
        api_server = (components.HOST, self._ports.apiserver)
        options = NodeOptions(
            str(self._paths.root), spec, api_server, str(self._venv_bin), self._heartbeat_seconds, self._kubernetes
        )
        components.issue_node(self._paths, self._ports, spec.name)
        command = [sys.executable, "-m", "trainium_devcluster.node", str(options.write())]
        environment = build_node_environment(os.environ, self._paths, spec.name, self._binaries)
        node = PoolNode(spec, self._children.start(f"node-{spec.name}", command, environment))
        self._nodes[spec.name] = node
        self._children.run_in_background(self._clean_up_after_exit(node))

    async def _clean_up_after_exit(self, node: PoolNode) -> None:
        await node.child.ended.wait()
        if node.state is NodeState.RUNNING:
            logger.warning("node %s ended with code %s", node.spec.name, node.child.code)
        node.state = NodeState.DEAD
        kill_tree(None, MARKER, self._paths.format_marker(node.spec.name))

    def _release_ports(self, node: PoolNode) -> None:
        if node.unresponsive_ports is not None:
            node.unresponsive_ports.release()
            node.unresponsive_ports = None

    def _kill(self, node: PoolNode) -> None:
        node.state = NodeState.DEAD
        kill_tree(node.child.pid, MARKER, self._paths.format_marker(node.spec.name))

    def _thaw(self, node: PoolNode) -> None:
        pid = node.child.pid
        if node.state is NodeState.FROZEN and pid is not None:
            thaw_tree(pid, MARKER, self._paths.format_marker(node.spec.name))
            node.state = NodeState.RUNNING

    def _request_stop(self, node: PoolNode) -> None:
        self._thaw(node)  # a stopped process does not handle the signal
        node.state = NodeState.STOPPING if node.child.code is None else NodeState.DEAD
        node.child.identity.signal(signal.SIGTERM)

    def _get(self, name: str) -> PoolNode:
        if name not in self._nodes:
            names = ", ".join(sorted(self._nodes)) or "none"
            raise ClusterError(f"Cluster {self._paths.name!r} has no node {name!r}; its nodes: {names}.")
        return self._nodes[name]


def build_node_environment(base: Mapping[str, str], paths: ClusterPaths, node: str, binaries: Path) -> dict[str, str]:
    """Return the environment of a node process: the supervisor's, the marker, and the cluster's PATH."""
    path = f"{binaries}:{base.get('PATH', '/usr/bin:/bin')}"
    return {**base, MARKER: paths.format_marker(node), "PATH": path, "PYTHONUNBUFFERED": "1"}
