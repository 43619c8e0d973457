"""Add affinity terms to pods: near each other, apart, away from bad nodes, or together on one UltraServer.

The terms of units are those of AWS's page ("Schedule MPI jobs to run on Neuron UltraServer on EKS"): pods of one unit
attract each other, and workers of anything else repel them, by the label that the nodes of an UltraServer share.

Invariant: terms of the user's template stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.spec.scheduling import Topology
from trainium_contract.wire.worker_env import LABEL_ROLE, LABEL_UNIT, ROLE_WORKER
from trainium_operator.plan.model import names
from trainium_operator.plan.model.names import LABEL_HOST, LAYERS

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import JobView, PlanSettings

Json = dict[str, Any]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_WEIGHTS = dict(zip(LAYERS, (10, 25, 50, 100), strict=True))
"""Weights of the preferences for each layer; the scheduler adds those that are met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AvoidedNodes:
    """Nodes that new pods avoid, by their label kubernetes.io/hostname."""

    required: tuple[str, ...] = ()
    """Nodes that are always avoided."""
    preferred: tuple[str, ...] = ()
    """Nodes that are used only if no other is left."""


def add_affinity(spec: Json, job: JobView, settings: PlanSettings) -> Json:
    """Add affinity between the job's workers, if nodes carry the labels and the job asks for it.

    Required means one domain of the widest layer; the nearer layers are always preferences.
    """
    topology = job.spec.scheduling.topology
    if topology is Topology.IGNORED:
        return spec
    term: Json = {"labelSelector": {"matchLabels": names.build_selector_labels(job.name)}}
    preferred = [
        {"weight": _WEIGHTS[layer], "podAffinityTerm": {**term, "topologyKey": layer}}
        for layer in LAYERS
        if layer in settings.topology_layers and not (topology is Topology.REQUIRED and layer == LAYERS[0])
    ]
    required = [{**term, "topologyKey": LAYERS[0]}] if topology is Topology.REQUIRED else []
    affinity = spec.get("affinity") or {}
    for field, terms in ((_REQUIRED, required), (_PREFERRED, preferred)):
        if terms:
            affinity = _add_terms(affinity, "podAffinity", field, *terms)
    return {**spec, "affinity": affinity} if required or preferred else spec


def add_anti_affinity(affinity: Json, job: str) -> Json:
    """Return the affinity of a worker that shares its node with no other worker of the job."""
    term = {"labelSelector": {"matchLabels": names.build_selector_labels(job)}, "topologyKey": LABEL_HOST}
    return _add_terms(affinity, "podAntiAffinity", _REQUIRED, term)


def exclude_nodes(affinity: Json, avoided: AvoidedNodes) -> Json:
    """Return the affinity of a new pod with the avoided nodes."""
    if avoided.required:
        nodes = affinity.get("nodeAffinity") or {}
        # Only one of several terms must hold, so each must exclude the nodes.
        terms = (nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
        excluded = {"nodeSelectorTerms": [_add_expression(term, avoided.required) for term in terms]}
        affinity = {**affinity, "nodeAffinity": {**nodes, _REQUIRED: excluded}}
    if avoided.preferred:
        preference = {"weight": 100, "preference": _add_expression({}, avoided.preferred)}
        affinity = _add_terms(affinity, "nodeAffinity", _PREFERRED, preference)
    return affinity


def assign_unit(pod: Json, unit: str, topology_key: str) -> Json:
    """Return the pod as part of this unit, on nodes with this label."""
    metadata = {**pod["metadata"], "labels": {**pod["metadata"]["labels"], LABEL_UNIT: unit}}
    same: Json = {"labelSelector": {"matchLabels": {LABEL_UNIT: unit}}, "topologyKey": topology_key}
    is_another = {"key": LABEL_UNIT, "operator": "NotIn", "values": [unit]}
    others: Json = {
        # Also workers without the label, of jobs that know no units.
        "labelSelector": {"matchLabels": {LABEL_ROLE: ROLE_WORKER}, "matchExpressions": [is_another]},
        "namespaceSelector": {},
        "topologyKey": topology_key,
    }
    affinity = _add_terms(pod["spec"].get("affinity") or {}, "podAffinity", _REQUIRED, same)
    affinity = _add_terms(affinity, "podAntiAffinity", _REQUIRED, others)
    return {**pod, "metadata": metadata, "spec": {**pod["spec"], "affinity": affinity}}


def _add_terms(affinity: Json, kind: str, field: str, *terms: Json) -> Json:
    """Return the affinity with further terms in the list `field` of this kind."""
    old = affinity.get(kind) or {}
    return {**affinity, kind: {**old, field: [*(old.get(field) or []), *terms]}}


def _add_expression(term: Json, nodes: tuple[str, ...]) -> Json:
    expression = {"key": LABEL_HOST, "operator": "NotIn", "values": list(nodes)}
    return {**term, "matchExpressions": [*(term.get("matchExpressions") or []), expression]}
