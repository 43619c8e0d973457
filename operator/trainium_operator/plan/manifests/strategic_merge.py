"""Merge a user's partial pod template into the operator's pod, as kubectl's strategic merge does for these lists.

Invariants: lists whose items have a key (containers by name, mounts by path, ...) are merged item by item in the
operator's order. Any other list of the user replaces the operator's; null removes a field.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "tolerations": ("key", "effect"),
    "resourceClaims": ("name",),
    "claims": ("name",),
}
_ONE_OF = frozenset({"volumes", "env", "resourceClaims"})
"""Items with one of several alternatives: the user's item replaces the operator's as a whole."""


def merge_template(ours: Json, theirs: Json) -> Json:
    """Return `ours` with `theirs` merged into it; neither is changed."""
    merged = dict(ours)
    for key, value in theirs.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_value(key, merged.get(key), value)
    return merged


def _merge_value(key: str, ours: Any, theirs: Any) -> Any:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return merge_template(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list) and key in _LIST_KEYS:
        return _merge_list(key, ours, theirs)
    return theirs


def _merge_list(name: str, ours: list[Any], theirs: list[Any]) -> list[Any]:
    merged = list(ours)
    for item in theirs:
        index = next((at for at, mine in enumerate(merged) if _same(name, mine, item)), None)
        if index is None:
            merged.append(item)
        elif name in _ONE_OF or not isinstance(item, dict):
            merged[index] = item
        else:
            merged[index] = merge_template(merged[index], item)
    return merged


def _same(name: str, mine: Any, item: Any) -> bool:
    if not isinstance(mine, dict) or not isinstance(item, dict):
        return bool(mine == item)
    return all(mine.get(key) == item.get(key) for key in _LIST_KEYS[name])
