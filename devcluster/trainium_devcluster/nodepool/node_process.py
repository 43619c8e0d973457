"""Start the process of a node: its command line and its environment."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_devcluster.controlplane.components import HOST, Ports
from trainium_devcluster.state import MARKER, ClusterPaths, NodeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class NodeState(StrEnum):
    """State of the process of a node."""

    RUNNING = "running"
    FROZEN = "frozen"
    STOPPING = "stopping"
    DEAD = "dead"


def node_command(
    spec: NodeSpec, paths: ClusterPaths, ports: Ports, venv_bin: Path, heartbeat_seconds: float
) -> list[str]:
    """Return the command line of a node."""
    folder = paths.node(spec.name)
    command = [sys.executable, "-m", "trainium_devcluster.node"]
    command += ["--name", spec.name, "--kubeconfig", str(folder / "kubeconfig"), "--state-dir", str(folder)]
    command += ["--control-socket", str(paths.node_socket(spec.name)), "--venv-bin", str(venv_bin)]
    command += ["--images-dir", str(paths.images)]
    command += ["--api-server", f"{HOST}:{ports.apiserver}", "--client-ca", str(paths.pki / "ca.crt")]
    command += ["--serving-ca-cert", str(paths.pki / "ca.crt"), "--serving-ca-key", str(paths.pki / "ca.key")]
    command += ["--neuron", str(spec.neuron), "--efa", str(spec.efa), "--cpu", spec.cpu, "--memory", spec.memory]
    command += ["--heartbeat", f"{heartbeat_seconds:g}"]
    for key, value in spec.labels.items():
        command += ["--label", f"{key}={value}"]
    for taint in spec.taints:
        command += ["--taint", taint]
    return command


def node_environment(base: Mapping[str, str], paths: ClusterPaths, node: str, binaries: Path) -> dict[str, str]:
    """Return the environment of a node's process: the supervisor's, the marker, and the cluster's programs on PATH."""
    return {
        **base,
        MARKER: paths.marker(node),
        "PATH": f"{binaries}:{base.get('PATH', '/usr/bin:/bin')}",
        "PYTHONUNBUFFERED": "1",
    }
