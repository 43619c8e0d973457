"""Workers of one job drawn near each other in the network, by pod affinity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.spec.scheduling import Topology
from trainium_operator.plan.model import names
from trainium_operator.plan.model.names import LAYERS

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import JobView, PlanSettings

Json = dict[str, Any]

_WEIGHTS = dict(zip(LAYERS, (10, 25, 50, 100), strict=True))
"""Of the preferences for each layer; the scheduler adds up those that hold."""


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
