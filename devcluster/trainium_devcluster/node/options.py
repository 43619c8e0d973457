"""Define the options of a node, in a file that the supervisor writes and the node's process reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_devcluster.errors import ClusterError
from trainium_devcluster.node.api import quantities
from trainium_devcluster.state import ClusterPaths, NodeSpec, parse_node

if TYPE_CHECKING:
    from collections.abc import Mapping

KUBELET_PORT = 10250
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The options of a node; an invalid value raises ClusterError."""

    root: str
    """Folder of the cluster."""
    spec: NodeSpec
    api_server: tuple[str, int]
    """Host and port for pods."""
    venv_bin: str
    """Folder that comes first in the PATH of pods."""
    heartbeat_seconds: float
    kubernetes: str
    """The version that the node reports for its kubelet."""

    def __post_init__(self) -> None:
        _ = self.taints
        for resource, amount in self._parse_requested().items():
            try:
                quantities.parse(amount)
            except ValueError as error:
                raise ClusterError(f"Node {self.name!r}, capacity of {resource}: {error}.") from None

    @property
    def name(self) -> str:
        """The node's name."""
        return self.spec.name

    @property
    def paths(self) -> ClusterPaths:
        """The files of the cluster."""
        return ClusterPaths(Path(self.root))

    @property
    def state_dir(self) -> Path:
        """The folder of this node."""
        return self.paths.find_node_folder(self.name)

    @property
    def claims_dir(self) -> Path:
        """The folder of volumes of the cluster's storage class, which all nodes share."""
        return self.state_dir.parent / "claims"

    @property
    def capacity(self) -> dict[str, str]:
        """The resources that the node registers, without those of amount 0."""
        return {name: amount for name, amount in self._parse_requested().items() if quantities.parse(amount) > 0}

    @property
    def taints(self) -> list[dict[str, str]]:
        """The taints that the node registers."""
        return [_parse_taint(text) for text in self.spec.taints]

    def _parse_requested(self) -> dict[str, str]:
        return {
            "cpu": self.spec.cpu,
            "memory": self.spec.memory,
            "pods": "110",
            "ephemeral-storage": "50Gi",
            "aws.amazon.com/neuron": str(self.spec.neuron),
            "aws.amazon.com/neuroncore": str(2 * self.spec.neuron),
            "vpc.amazonaws.com/efa": str(self.spec.efa),
        }

    def write(self) -> Path:
        """Store the options in the node's folder; return the file."""
        file = self.state_dir / "options.json"
        file.write_text(json.dumps(asdict(self)))
        return file

    @staticmethod
    def read(file: Path) -> NodeOptions:
        """Read the options that `write` stored."""
        fields: Mapping[str, Any] = json.loads(file.read_text())
        host, port = fields["api_server"]
        return NodeOptions(**{**fields, "spec": parse_node(fields["spec"]), "api_server": (host, port)})


def _parse_taint(text: str) -> dict[str, str]:
    pair, _, effect = text.rpartition(":")
    key, _, value = pair.partition("=")
    if not key or effect not in _EFFECTS:
        raise ClusterError(f"The taint {text!r} is not KEY[=VALUE]:EFFECT with an effect of {', '.join(_EFFECTS)}.")
    return {"key": key, "value": value, "effect": effect}
