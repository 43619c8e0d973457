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
_REPLACED_LISTS = frozenset({"volumes", "env", "resourceClaims"})
"""Items with one of several alternatives: the user's item replaces the operator's as a whole."""


def merge_template(base: Json, override: Json) -> Json:
    """Return `base` with `override` merged into it; neither is changed."""
    merged = dict(base)
    for key, value in override.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_value(key, merged.get(key), value)
    return merged


def _merge_value(key: str, base: Any, override: Any) -> Any:
    if isinstance(base, dict) and isinstance(override, dict):
        return merge_template(base, override)
    if isinstance(base, list) and isinstance(override, list) and key in _LIST_KEYS:
        return _merge_list(key, base, override)
    return override


def _merge_list(name: str, base: list[Any], override: list[Any]) -> list[Any]:
    merged = list(base)
    for item in override:
        index = next((at for at, existing in enumerate(merged) if _has_same_key(name, existing, item)), None)
        if index is None:
            merged.append(item)
        elif name in _REPLACED_LISTS or not isinstance(item, dict):
            merged[index] = item
        else:
            merged[index] = merge_template(merged[index], item)
    return merged


def _has_same_key(name: str, existing: Any, item: Any) -> bool:
    if not isinstance(existing, dict) or not isinstance(item, dict):
        return bool(existing == item)
    return all(existing.get(key) == item.get(key) for key in _LIST_KEYS[name])
