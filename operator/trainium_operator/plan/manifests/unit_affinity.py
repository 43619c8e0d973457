"""Mark a pod as part of a unit, and let the scheduler keep the pods of a unit on one UltraServer, alone there.

The terms are those of AWS's page ("Schedule MPI jobs to run on Neuron UltraServer on EKS"): pods of one unit attract
each other, and workers of anything else repel them, by the label that the nodes of an UltraServer share.
"""

from __future__ import annotations

from typing import Any

from trainium_contract.wire.worker_env import LABEL_ROLE, LABEL_UNIT, ROLE_WORKER

Json = dict[str, Any]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def with_unit(pod: Json, unit: str, topology_key: str) -> Json:
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
    affinity = pod["spec"].get("affinity") or {}
    affinity = _with_term(_with_term(affinity, "podAffinity", same), "podAntiAffinity", others)
    return {**pod, "metadata": metadata, "spec": {**pod["spec"], "affinity": affinity}}


def _with_term(affinity: Json, kind: str, term: Json) -> Json:
    terms = affinity.get(kind) or {}
    return {**affinity, kind: {**terms, _REQUIRED: [*(terms.get(_REQUIRED) or []), term]}}
