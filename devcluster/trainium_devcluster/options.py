"""Define the options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainium_devcluster.binaries.catalog import KUBERNETES_VARIABLE
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

Name = Annotated[str, typer.Option("--name", envvar="TRAINIUM_DEVCLUSTER", help="Which cluster.")]
Kubernetes = Annotated[
    str | None,
    typer.Option("--kubernetes", envvar=KUBERNETES_VARIABLE, help="Version of Kubernetes: 1.36 (default) or 1.37."),
]
Neuron = Annotated[int, typer.Option("--neuron", min=0, help="aws.amazon.com/neuron of each node.")]
Efa = Annotated[int, typer.Option("--efa", min=0, help="vpc.amazonaws.com/efa of each node.")]
Cpu = Annotated[str, typer.Option("--cpu", help="cpu of each node, a Kubernetes quantity.")]
Memory = Annotated[str, typer.Option("--memory", help="memory of each node, a Kubernetes quantity.")]
NodeLabels = Annotated[list[str] | None, typer.Option("--label", help="key=value on each node; may be repeated.")]
NodeTaints = Annotated[
    list[str] | None, typer.Option("--taint", help="key=value:Effect on each node; may be repeated.")
]


def parse_labels(pairs: Sequence[str] | None) -> dict[str, str]:
    """Parse `key=value` options; raises ClusterError for one without a key or an equals sign."""
    labels = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ClusterError(f"The label {pair!r} is not of the form key=value.")
        labels[key] = value
    return labels
