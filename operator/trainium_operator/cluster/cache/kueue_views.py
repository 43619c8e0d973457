"""From raw JSON of Kueue's objects to the plan's small frozen views, and a plan's conditions back to JSON.

Invariant: nobody else knows the shape of that JSON. Field names were read from kueue.x-k8s.io/v1beta2 and from objects
of a real controller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.cluster.cache.parts import items_of, mapping_of, text_of, texts_of, whole_of
from trainium_operator.plan.model import names, quota

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_operator.cluster.api.client import Json

LONGEST_MESSAGE = 1024
"""Characters of a Workload's message that are kept and written."""
_KNOWN = {kind.value: kind for kind in quota.WorkloadCondition}
_TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")


def workload_view(raw: Json) -> quota.WorkloadView:
    """Parse a Workload. Raises ValueError when it lacks the part of the job's quota that it asks for."""
    metadata, spec, status = raw["metadata"], mapping_of(raw.get("spec")), mapping_of(raw.get("status"))
    annotations = mapping_of(metadata.get("annotations"))
    grants = items_of(mapping_of(status.get("admission")).get("podSetAssignments"))
    return quota.WorkloadView(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        part=int(annotations[names.ANNOTATION_PART]),
        asked={text_of(each.get("name")): _count(each, default=1) for each in items_of(spec.get("podSets"))},
        content_hash=text_of(annotations.get(names.ANNOTATION_CONTENT_HASH)),
        active=spec.get("active") is not False,
        deleting="deletionTimestamp" in metadata,
        conditions=tuple(
            _condition(each) for each in items_of(status.get("conditions")) if text_of(each.get("type")) in _KNOWN
        ),
        grants=tuple(map(_grant, grants)),
        updates=_updates(items_of(status.get("admissionChecks"))),
    )


def flavor_view(raw: Json) -> quota.Placement:
    """Parse a ResourceFlavor: what it requires of pods."""
    spec = mapping_of(raw.get("spec"))
    return quota.Placement(
        node_selector=texts_of(spec.get("nodeLabels")),
        tolerations=tuple(map(_toleration, items_of(spec.get("tolerations")))),
    )


def priority_view(raw: Json) -> tuple[int, bool]:
    """Return the value of a PriorityClass, and whether it is the cluster's default."""
    return int(raw["value"]), raw.get("globalDefault") is True


def with_conditions(old: Iterable[Json], conditions: Iterable[quota.WorkloadConditionView], now: str) -> list[Json]:
    """Return the conditions with these set; the time changes only with the status. `now` is RFC 3339."""
    found = {each["type"]: each for each in old}
    for each in conditions:
        status = "True" if each.true else "False"
        before = found.get(each.type.value, {})
        found[each.type.value] = {
            "type": each.type.value,
            "status": status,
            "reason": each.reason or each.type.value,
            "message": each.message[:LONGEST_MESSAGE],
            "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == status else now,
        }
    return list(found.values())


def _condition(raw: Json) -> quota.WorkloadConditionView:
    return quota.WorkloadConditionView(
        _KNOWN[raw["type"]],
        true=raw.get("status") == "True",
        reason=text_of(raw.get("reason"))[:64],
        message=text_of(raw.get("message"))[:LONGEST_MESSAGE],
    )


def _grant(raw: Json) -> quota.PodSetGrant:
    flavors = tuple(dict.fromkeys(texts_of(raw.get("flavors")).values()))
    return quota.PodSetGrant(name=text_of(raw.get("name")), count=_count(raw, default=0), flavors=flavors)


def _count(raw: Json, *, default: int) -> int:
    found = whole_of(raw.get("count"))
    return default if found is None else found


def _updates(checks: Iterable[Json]) -> dict[str, quota.Placement]:
    """Return one update for each pod set, of all ready checks; Kueue refuses contradictory ones."""
    found: dict[str, quota.Placement] = {}
    for check in checks:
        for each in items_of(check.get("podSetUpdates")) if check.get("state") == "Ready" else ():
            name = text_of(each.get("name"))
            before = found.get(name, quota.Placement())
            found[name] = quota.Placement(
                labels={**before.labels, **texts_of(each.get("labels"))},
                annotations={**before.annotations, **texts_of(each.get("annotations"))},
                node_selector={**before.node_selector, **texts_of(each.get("nodeSelector"))},
                tolerations=(*before.tolerations, *map(_toleration, items_of(each.get("tolerations")))),
            )
    return found


def _toleration(raw: Json) -> Json:
    return {key: raw[key] for key in _TOLERATION if key in raw}
