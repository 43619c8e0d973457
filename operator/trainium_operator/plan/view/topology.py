"""Where nodes are in the network, and which workers are near each other.

A place is the path from the widest domain to the node: network layers (the higher the number the nearer), zone, host
name. Two nodes are the nearer the longer the beginning that their places share. Invariants: a missing label is an empty
step of the path, so unlabelled clusters behave as before; nothing here looks at more nodes than the job has workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_operator.plan.model.node_labels import LABEL_HOST, LABEL_ZONE, LAYERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_operator.plan.model.observed import NodeView
    from trainium_operator.plan.view.workers import Worker

Json = dict[str, Any]
Place = tuple[str, ...]


def place_of(name: str, node: NodeView | None) -> Place:
    """The place of a node; of one that is not known, only its name."""
    labels = node.labels if node is not None else {}
    return (*(labels.get(layer, "") for layer in LAYERS), labels.get(LABEL_ZONE, ""), labels.get(LABEL_HOST, name))


def nearest_first(workers: Sequence[Worker], nodes: Mapping[str, NodeView]) -> list[Worker]:
    """Workers in domains that hold many of them first, domain by domain; within the nearest one, oldest first.

    So any beginning of the list is spread over few domains, and what is left over is scattered anyway.
    """
    placed = [(place_of(worker.pod.node, nodes.get(worker.pod.node)), worker) for worker in workers]
    return [worker for _, worker in _flattened(placed, 0)]


def _flattened(placed: list[tuple[Place, Worker]], depth: int) -> list[tuple[Place, Worker]]:
    if depth > len(LAYERS):  # below the layers and the zone there are only single nodes
        return sorted(placed, key=lambda item: item[1].pod.ordinal)
    domains: dict[str, list[tuple[Place, Worker]]] = {}
    for item in placed:
        domains.setdefault(item[0][depth], []).append(item)
    order = sorted(domains, key=lambda name: (-len(domains[name]), name))
    return [item for name in order for item in _flattened(domains[name], depth + 1)]
