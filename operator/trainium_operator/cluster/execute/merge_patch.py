"""Build merge patches that replace the whole content; a plain merge patch keeps fields that it does not name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.api_server.responses import Json

_CONTENT = frozenset({"data", "binaryData", "spec"})


def replace_content(current: Json, manifest: Json) -> Json:
    """Return a merge patch after which an object's content is the manifest's and nothing else, at any depth.

    Fields that the API server defaults are removed too, and it adds them again.
    """
    patch: Json = {}
    for part in (current.keys() | manifest.keys()) & _CONTENT:
        old, new = current.get(part) or {}, manifest.get(part) or {}
        patch[part] = _diff_values(old, new) if new else None
    return patch


def _diff_values(old: Json, new: Json) -> Json:
    """Return the patch that changes one object into the other; lists and scalars are always replaced whole."""
    patch: Json = dict.fromkeys(old.keys() - new.keys())
    for name, value in new.items():
        before = old.get(name)
        patch[name] = _diff_values(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return patch
