"""Check the shape of `workers.template`: objects, lists and strings, in the parts that are read.

Invariant: a shape other than a pod template's is refused here with its place, so code that merges templates never meets
it. The API server reports all other errors of a template for the pods. `null` removes a field, so it is allowed
anywhere except in a list.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

_OBJECT: dict[str, Any] = {}
_TERMS = {
    f"{kind}DuringSchedulingIgnoredDuringExecution": [{"podAffinityTerm": _OBJECT}]
    for kind in ("required", "preferred")
}
_CONTAINER = {
    "name": str,
    "image": str,
    "env": [_OBJECT],
    "resources": {"requests": _OBJECT, "limits": _OBJECT, "claims": [_OBJECT]},
    "volumeMounts": [_OBJECT],
}
_SHAPE = {
    "metadata": {"labels": _OBJECT, "annotations": _OBJECT},
    "spec": {
        "containers": [_CONTAINER],
        "initContainers": [_CONTAINER],
        "volumes": [{"name": str, "emptyDir": _OBJECT}],
        "tolerations": [_OBJECT],
        "nodeSelector": _OBJECT,
        "resources": _OBJECT,
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [_OBJECT], "matchFields": [_OBJECT]}]
                },
                "preferredDuringSchedulingIgnoredDuringExecution": [_OBJECT],
            },
            "podAffinity": _TERMS,
            "podAntiAffinity": _TERMS,
        },
    },
}
"""A list has one entry, the shape of each element; other fields of an object may be anything."""
_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}


def describe_shape_error(template: dict[str, Any]) -> str:
    """Return a sentence that names the part with the wrong shape; empty if there is none."""
    return _find_mismatch(template, _SHAPE, "")


def _check_template(template: dict[str, Any]) -> dict[str, Any]:
    if mismatch := describe_shape_error(template):
        raise ValueError(f"{mismatch}; write it as in the template of a Deployment")
    return template


PodTemplate = Annotated[dict[str, Any], AfterValidator(_check_template)]
"""A partial PodTemplateSpec."""


def _find_mismatch(value: Any, shape: Any, place_prefix: str) -> str:
    wanted = shape if isinstance(shape, type) else type(shape)
    if not isinstance(value, wanted):
        return f"{place_prefix} is {_read_name(value)} where {_NAMES[wanted]} belongs"
    if isinstance(value, list):
        parts = ((f"{place_prefix}[{number}]", inner, shape[0]) for number, inner in enumerate(value))
    elif isinstance(value, dict):
        checked_fields = ((key, inner) for key, inner in value.items() if key in shape and inner is not None)
        parts = ((f"{place_prefix}.{key}".removeprefix("."), inner, shape[key]) for key, inner in checked_fields)
    else:
        return ""
    return next((mismatch for place, inner, part in parts if (mismatch := _find_mismatch(inner, part, place))), "")


def _read_name(value: Any) -> str:
    return "nothing" if value is None else _NAMES.get(type(value), f"{value!r:.40}")
