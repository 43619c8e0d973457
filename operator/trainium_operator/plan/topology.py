"""Where nodes are in the network, and how workers are brought near each other.

A place is the path from the widest domain to the node: network layers (the higher the number the nearer), zone, host
name. Two nodes are the nearer the longer the beginning that their places share. Invariants: a missing label is an empty
step of the path, so unlabelled clusters behave as before; nothing here looks at more nodes than the job has workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.scheduling import Topology
from trainium_operator.plan import names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_operator.plan.model import JobView, NodeView, PlanSettings
    from trainium_operator.plan.workers import Worker

Json = dict[str, Any]
Place = tuple[str, ...]

LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{number}" for number in (1, 2, 3, 4))
"""Labels of EC2's network topology on EKS nodes, from the widest domain to the nearest."""
ZONE = "topology.kubernetes.io/zone"
_HOST = "kubernetes.io/hostname"
_WEIGHTS = dict(zip(LAYERS, (10, 25, 50, 100), strict=True))
"""Of the preferences for each layer; the scheduler adds up those that hold."""


def place_of(name: str, node: NodeView | None) -> Place:
    """The place of a node; of one that is not known, only its name."""
    labels = node.labels if node is not None else {}
    return (*(labels.get(layer, "") for layer in LAYERS), labels.get(ZONE, ""), labels.get(_HOST, name))


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


def with_affinity(spec: Json, job: JobView, settings: PlanSettings) -> Json:
    """The pod spec with the job's workers drawn to each other, as far as nodes carry the labels and the job wants it.

    Required stands for one domain of the widest layer; the nearer layers are preferences in any case.
    """
    wanted = job.spec.scheduling.topology
    if wanted is Topology.IGNORED:
        return spec
    term: Json = {"labelSelector": {"matchLabels": names.selector_labels(job.name)}}
    preferred = [
        {"weight": _WEIGHTS[layer], "podAffinityTerm": {**term, "topologyKey": layer}}
        for layer in LAYERS
        if layer in settings.topology_layers and not (wanted is Topology.REQUIRED and layer == LAYERS[0])
    ]
    required = [{**term, "topologyKey": LAYERS[0]}] if wanted is Topology.REQUIRED else []
    if not preferred and not required:
        return spec
    affinity = dict(spec.get("affinity") or {})
    ours = dict(affinity.get("podAffinity") or {})
    for key, terms in (("required", required), ("preferred", preferred)):
        if terms:
            field = f"{key}DuringSchedulingIgnoredDuringExecution"
            ours[field] = [*(ours.get(field) or []), *terms]
    return {**spec, "affinity": {**affinity, "podAffinity": ours}}
