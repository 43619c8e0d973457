"""Parse Kueue's objects into small frozen views, and convert a plan's conditions back to JSON.

Invariant: no other module reads that JSON. Field names are those of kueue.x-k8s.io/v1beta2, checked with objects of a
real controller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.cluster.cache.parts import as_integer, as_mapping, as_mappings, as_text, as_texts
from trainium_operator.plan.model import names, quota

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_contract.api_server.responses import Json

MAX_MESSAGE_CHARACTERS = 1024
"""Characters of a Workload's message that are kept and written."""
_KNOWN = {kind.value: kind for kind in quota.WorkloadCondition}
_TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")


def parse_workload(raw: Json) -> quota.WorkloadView:
    """Parse a Workload. Raises ValueError when the part with the job's quota request is missing."""
    metadata, spec, status = raw["metadata"], as_mapping(raw.get("spec")), as_mapping(raw.get("status"))
    annotations = as_mapping(metadata.get("annotations"))
    grants = as_mappings(as_mapping(status.get("admission")).get("podSetAssignments"))
    return quota.WorkloadView(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        part=int(annotations[names.ANNOTATION_PART]),
        requested_pods={
            as_text(pod_set.get("name")): _parse_count(pod_set, default=1)
            for pod_set in as_mappings(spec.get("podSets"))
        },
        content_hash=as_text(annotations.get(names.ANNOTATION_CONTENT_HASH)),
        active=spec.get("active") is not False,
        deleting="deletionTimestamp" in metadata,
        conditions=tuple(
            _parse_condition(condition)
            for condition in as_mappings(status.get("conditions"))
            if as_text(condition.get("type")) in _KNOWN
        ),
        grants=tuple(map(_parse_grant, grants)),
        updates=_merge_updates(as_mappings(status.get("admissionChecks"))),
    )


def parse_flavor(raw: Json) -> quota.Placement:
    """Parse a ResourceFlavor: the node labels and tolerations that it requires of pods."""
    spec = as_mapping(raw.get("spec"))
    return quota.Placement(
        node_selector=as_texts(spec.get("nodeLabels")),
        tolerations=tuple(map(_parse_toleration, as_mappings(spec.get("tolerations")))),
    )


def parse_priority_class(raw: Json) -> tuple[int, bool]:
    """Return the value of a PriorityClass, and whether it is the cluster's default."""
    return int(raw["value"]), raw.get("globalDefault") is True


def set_conditions(old: Iterable[Json], conditions: Iterable[quota.WorkloadConditionView], now: str) -> list[Json]:
    """Return the conditions with these set; a transition time changes only with the status. `now` is RFC 3339."""
    by_type = {condition["type"]: condition for condition in old}
    for condition in conditions:
        status = "True" if condition.is_true else "False"
        before = by_type.get(condition.type.value, {})
        by_type[condition.type.value] = {
            "type": condition.type.value,
            "status": status,
            "reason": condition.reason or condition.type.value,
            "message": condition.message[:MAX_MESSAGE_CHARACTERS],
            "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == status else now,
        }
    return list(by_type.values())


def _parse_condition(raw: Json) -> quota.WorkloadConditionView:
    return quota.WorkloadConditionView(
        _KNOWN[raw["type"]],
        is_true=raw.get("status") == "True",
        reason=as_text(raw.get("reason"))[:64],
        message=as_text(raw.get("message"))[:MAX_MESSAGE_CHARACTERS],
    )


def _parse_grant(raw: Json) -> quota.PodSetGrant:
    flavors = tuple(dict.fromkeys(as_texts(raw.get("flavors")).values()))
    return quota.PodSetGrant(name=as_text(raw.get("name")), count=_parse_count(raw, default=0), flavors=flavors)


def _parse_count(raw: Json, *, default: int) -> int:
    count = as_integer(raw.get("count"))
    return default if count is None else count


def _merge_updates(checks: Iterable[Json]) -> dict[str, quota.Placement]:
    """Return one update for each pod set from all ready checks; Kueue rejects contradictory ones."""
    found: dict[str, quota.Placement] = {}
    for check in checks:
        for pod_set_update in as_mappings(check.get("podSetUpdates")) if check.get("state") == "Ready" else ():
            name = as_text(pod_set_update.get("name"))
            before = found.get(name, quota.Placement())
            found[name] = quota.Placement(
                labels={**before.labels, **as_texts(pod_set_update.get("labels"))},
                annotations={**before.annotations, **as_texts(pod_set_update.get("annotations"))},
                node_selector={**before.node_selector, **as_texts(pod_set_update.get("nodeSelector"))},
                tolerations=(
                    *before.tolerations,
                    *map(_parse_toleration, as_mappings(pod_set_update.get("tolerations"))),
                ),
            )
    return found


def _parse_toleration(raw: Json) -> Json:
    return {key: raw[key] for key in _TOLERATION if key in raw}
