"""From raw JSON of Kueue's objects to the plan's small frozen views, and a plan's conditions back to JSON.

Invariant: nobody else knows the shape of that JSON. Field names were read from kueue.x-k8s.io/v1beta2 and from objects
of a real controller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_operator.plan.model import names
from trainium_operator.plan.model.quota import Placement, PodSetGrant, Said, WorkloadCondition, WorkloadView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_operator.cluster.api.client import Json

LONGEST_MESSAGE = 1024
"""As much of a Workload's message as is kept of it, and written to it."""
_KNOWN = {kind.value: kind for kind in WorkloadCondition}
_TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")


def workload_view(raw: Json) -> WorkloadView:
    """A Workload. Raises ValueError when it does not say which part of a job's quota it asks for."""
    metadata, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    annotations = metadata.get("annotations") or {}
    return WorkloadView(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        part=int(annotations[names.ANNOTATION_PART]),
        asked={each["name"]: int(each.get("count", 1)) for each in spec.get("podSets") or ()},
        content_hash=annotations.get(names.ANNOTATION_CONTENT_HASH, ""),
        active=spec.get("active") is not False,
        deleting="deletionTimestamp" in metadata,
        said=tuple(_said(each) for each in status.get("conditions") or () if each["type"] in _KNOWN),
        grants=tuple(map(_grant, (status.get("admission") or {}).get("podSetAssignments") or ())),
        updates=_updates(status.get("admissionChecks") or ()),
    )


def flavor_view(raw: Json) -> Placement:
    """What a ResourceFlavor asks of pods."""
    spec = raw.get("spec") or {}
    return Placement(
        node_selector=_texts(spec.get("nodeLabels")), tolerations=tuple(map(_toleration, spec.get("tolerations") or ()))
    )


def priority_view(raw: Json) -> tuple[int, bool]:
    """Value of a PriorityClass, and whether it is the cluster's default."""
    return int(raw["value"]), raw.get("globalDefault") is True


def with_conditions(old: Iterable[Json], said: Iterable[Said], now: str) -> list[Json]:
    """The conditions with these set; the time changes only with the status. `now` is RFC 3339."""
    found = {each["type"]: each for each in old}
    for each in said:
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


def _said(raw: Json) -> Said:
    return Said(
        _KNOWN[raw["type"]],
        true=raw.get("status") == "True",
        reason=str(raw.get("reason", ""))[:64],
        message=str(raw.get("message", ""))[:LONGEST_MESSAGE],
    )


def _grant(raw: Json) -> PodSetGrant:
    flavors = tuple(dict.fromkeys((raw.get("flavors") or {}).values()))
    return PodSetGrant(name=raw["name"], count=int(raw.get("count") or 0), flavors=flavors)


def _updates(checks: Iterable[Json]) -> dict[str, Placement]:
    """Of all checks that are ready, one for each pod set; two that contradict each other are for Kueue to refuse."""
    found: dict[str, Placement] = {}
    for check in checks:
        for each in check.get("podSetUpdates") or () if check.get("state") == "Ready" else ():
            before = found.get(each["name"], Placement())
            found[each["name"]] = Placement(
                labels={**before.labels, **_texts(each.get("labels"))},
                annotations={**before.annotations, **_texts(each.get("annotations"))},
                node_selector={**before.node_selector, **_texts(each.get("nodeSelector"))},
                tolerations=(*before.tolerations, *map(_toleration, each.get("tolerations") or ())),
            )
    return found


def _toleration(raw: Json) -> Json:
    return {key: raw[key] for key in _TOLERATION if key in raw}


def _texts(value: Any) -> dict[str, str]:
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, dict) else {}
