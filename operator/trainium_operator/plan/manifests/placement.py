"""A worker pod as Kueue's admission wants it: its flavor's node labels and tolerations, and what checks add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_operator.plan.manifests.workloads import ANNOTATION_WORKLOAD, LABEL_POD_SET
from trainium_operator.plan.model.quota import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Json = dict[str, Any]


def merged(placements: Iterable[Placement]) -> tuple[Placement, str]:
    """All of them as one, and a sentence when two want different values for one key (empty when none do)."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    selector: dict[str, str] = {}
    tolerations: list[Mapping[str, Any]] = []
    problem = ""
    for each in placements:
        for what, into, more in (
            ("label", labels, each.labels),
            ("annotation", annotations, each.annotations),
            ("node selector", selector, each.node_selector),
        ):
            for key, value in more.items():
                if into.setdefault(key, value) != value and not problem:
                    problem = f"flavors, admission checks and the job want {what} {key} to be {into[key]} and {value}"
        tolerations += [toleration for toleration in each.tolerations if toleration not in tolerations]
    found = Placement(labels=labels, annotations=annotations, node_selector=selector, tolerations=tuple(tolerations))
    return found, problem


def placed(pod: Json, placement: Placement, *, pod_set: str, workload: str) -> Json:
    """The pod for a place of this pod set."""
    metadata, spec = pod["metadata"], pod["spec"]
    tolerations = list(spec.get("tolerations") or ())
    tolerations += [dict(each) for each in placement.tolerations if each not in tolerations]
    changed: Json = {"tolerations": tolerations} if tolerations else {}
    if placement.node_selector:
        changed["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **placement.node_selector}
    return {
        **pod,
        "metadata": {
            **metadata,
            "labels": {**placement.labels, **metadata.get("labels", {}), LABEL_POD_SET: pod_set},
            "annotations": {
                **placement.annotations,
                **metadata.get("annotations", {}),
                ANNOTATION_WORKLOAD: workload,
            },
        },
        "spec": {**spec, **changed},
    }
