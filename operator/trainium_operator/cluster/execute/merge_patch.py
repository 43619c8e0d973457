"""Bringing an object of ours in line, whoever wrote what is in it: a merge patch leaves alone what it does not name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_operator.cluster.api.client import Json

_CONTENT = frozenset({"data", "binaryData", "spec"})


def exactly(current: Json, manifest: Json) -> Json:
    """A merge patch after which an object's content is the manifest's and nothing else, at any depth.

    What the API server adds by itself is taken out too, and added again by it.
    """
    patch: Json = {}
    for part in (current.keys() | manifest.keys()) & _CONTENT:
        old, new = current.get(part) or {}, manifest.get(part) or {}
        patch[part] = _instead(old, new) if new else None
    return patch


def _instead(old: Json, new: Json) -> Json:
    """The patch that makes one object the other; lists and plain values are replaced whole in any case."""
    patch: Json = dict.fromkeys(old.keys() - new.keys())
    for name, value in new.items():
        before = old.get(name)
        patch[name] = _instead(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return patch
