"""Copy and merge JSON objects, as the API server does with patches and with server-side apply."""

from typing import Any

Json = dict[str, Any]


def copy_json(value: Any) -> Any:
    """Copy a JSON value, several times as fast as `copy.deepcopy`."""
    if isinstance(value, dict):
        return {key: copy_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [copy_json(inner) for inner in value]
    return value


def merge(base: Json, change: Json) -> Json:
    """Return `base` with `change`, with merged mappings."""
    nested = {
        key: merge(base[key], value)
        for key, value in change.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return base | change | nested


def apply_merge_patch(base: Json, patch: Json) -> Json:
    """Return `base` with a merge patch, in which null removes a field."""
    result = dict(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = apply_merge_patch(result[key], value)
        else:
            result[key] = value
    return result


def leaf_paths(value: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Return the path of each field with a value, which is what an apply owns; not of the type of the object."""
    if not isinstance(value, dict) or not value:
        return {path} if path else set()
    return {
        leaf
        for key, child in value.items()
        if key not in ("apiVersion", "kind")
        for leaf in leaf_paths(child, (*path, key))
    }


def remove_path(raw: Json, path: tuple[str, ...]) -> None:
    """Remove the field at this path, if there is one."""
    *parents, last = path
    for parent in parents:
        raw = raw.get(parent, {})
        if not isinstance(raw, dict):
            return
    raw.pop(last, None)
