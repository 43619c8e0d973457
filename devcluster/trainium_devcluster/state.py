"""Define the options of a cluster, and the locations of its files.

Guarantees:
- One folder per cluster name has all its files (keys, data, logs, pid files); only its owner can read it, and `down`
  removes it.
- While a cluster runs, its supervisor holds the lock in that folder; with a free lock no process of the cluster should
  run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_devcluster.binaries.catalog import DEFAULT_KUBERNETES
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
_SOCKET_PATH_LIMIT = 100  # the kernel allows 107 bytes

MARKER = "TRAINIUM_DEVCLUSTER_NODE"
"""Environment variable of every process of a node, including pods: `<state folder>/<node>`; finds leftover processes.
"""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """The options of a node."""

    name: str
    neuron: int = 16
    efa: int = 8
    cpu: str = "8"
    memory: str = "32Gi"
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[str, ...] = ()
    """Taints of the form `key=value:Effect`."""

    def __post_init__(self) -> None:
        check_name(self.name, "node")
        if self.neuron < 0 or self.efa < 0:
            raise ClusterError(f"Node {self.name!r} cannot have a negative number of devices; use 0 or more.")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The options of a cluster."""

    name: str
    nodes: tuple[NodeSpec, ...] = ()
    kubernetes: str = DEFAULT_KUBERNETES.number
    """The version of the control plane, which its nodes report as theirs."""
    node_monitor_grace_seconds: float | None = None
    """Time for which a silent node stays Ready; None for the default of the controller manager."""
    apiserver_args: tuple[str, ...] = ()
    controller_manager_args: tuple[str, ...] = ()
    scheduler_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "cluster")
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            raise ClusterError(f"Cluster {self.name!r} names a node twice; give each node its own name.")

    @property
    def heartbeat_seconds(self) -> float:
        """The interval of node heartbeats: that of a kubelet, or shorter for a shorter grace period."""
        grace = self.node_monitor_grace_seconds
        return 10.0 if grace is None else min(10.0, grace / 4)

    def to_json(self) -> str:
        """Encode the options for `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ClusterSpec:
        """Decode the text of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        nodes = tuple(parse_node(node) for node in fields.pop("nodes"))
        for name in ("apiserver_args", "controller_manager_args", "scheduler_args"):
            fields[name] = tuple(fields[name])
        return cls(nodes=nodes, **fields)


def parse_node(fields: Mapping[str, Any]) -> NodeSpec:
    """Create a node from the fields of its JSON form."""
    return NodeSpec(**{**fields, "taints": tuple(fields.get("taints", ()))})


@dataclass(frozen=True, slots=True)
class ClusterPaths:
    """The paths of a cluster's files."""

    root: Path

    @classmethod
    def of(cls, name: str) -> ClusterPaths:
        """Return the paths of the cluster with this name."""
        check_name(name, "cluster")
        return cls(find_clusters_folder() / name)

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.root.name

    @property
    def spec(self) -> Path:
        """The file of the cluster's options."""
        return self.root / "spec.json"

    @property
    def lock(self) -> Path:
        """The lock that the supervisor holds while the cluster runs."""
        return self.root / "lock"

    @property
    def pki(self) -> Path:
        """The folder of certificates and keys."""
        return self.root / "pki"

    @property
    def logs(self) -> Path:
        """The folder of logs, one per component and node."""
        return self.root / "logs"

    @property
    def pids(self) -> Path:
        """The folder of pid files, one per component and node."""
        return self.root / "pids"

    @property
    def kubeconfig(self) -> Path:
        """The file of the administrator's kubeconfig."""
        return self.root / "kubeconfig"

    @property
    def endpoints(self) -> Path:
        """The file of the components' ports, as JSON."""
        return self.root / "endpoints.json"

    @property
    def control_socket(self) -> Path:
        """The socket of the supervisor."""
        return shorten_socket_path(self.root / "supervisor.sock")

    @property
    def keep(self) -> Path:
        """An empty file; if it exists, the folder outlives the cluster."""
        return self.root / "keep"

    def find_node_folder(self, name: str) -> Path:
        """Return the folder of a node."""
        return self.root / "nodes" / name

    def find_node_socket(self, name: str) -> Path:
        """Return the socket of a node for fault commands."""
        return shorten_socket_path(self.find_node_folder(name) / "control.sock")

    def format_marker(self, node: str) -> str:
        """Return the value of the marker variable for the processes of a node."""
        return f"{self.root}/{node}"

    def is_running(self) -> bool:
        """Return whether a supervisor holds this cluster."""
        try:
            descriptor = os.open(self.lock, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)


def find_clusters_folder() -> Path:
    """Return the folder of all clusters of this user, below XDG_STATE_HOME or ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "trainium-devcluster"


def list_cluster_names() -> list[str]:
    """Return the names of the clusters that have a folder, running or not."""
    folder = find_clusters_folder()
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if (entry / "spec.json").is_file())


def check_name(name: str, what: str) -> None:
    """Raise ClusterError unless the name is valid in host names and paths."""
    if not _NAME.fullmatch(name):
        raise ClusterError(
            f"{name!r} cannot be the name of a {what}; use up to 40 lower-case letters, digits and dashes, "
            "beginning and ending with a letter or digit."
        )


def shorten_socket_path(path: Path) -> Path:
    """Return `path`, or a path in the temporary folder if it is too long for a Unix socket."""
    if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"trainium-devcluster-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{digest}.sock"
