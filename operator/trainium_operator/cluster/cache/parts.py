"""Read parts of an object's raw JSON; a missing part or one of another type is empty, and hides no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainium_contract.api_server.responses import Json

MAX_NAME_CHARACTERS = 253
"""Longest name of an object that the API server accepts; a cloud provider's machine id is far shorter."""


def as_mapping(value: Any) -> Json:
    """Return the value if it is an object, else an empty object."""
    return value if isinstance(value, dict) else {}


def as_mappings(value: Any) -> list[Json]:
    """Return the objects in a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def as_text(value: Any) -> str:
    """Return the value if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def as_name(value: Any) -> str:
    """Return the name of an object or a machine; empty if it is longer than a name can be."""
    name = as_text(value)
    return name if len(name) <= MAX_NAME_CHARACTERS else ""


def as_texts(value: Any) -> dict[str, str]:
    """Return the string values of an object, without its other entries."""
    return {key: text for key, text in as_mapping(value).items() if isinstance(text, str)}


def as_integer(value: Any) -> int | None:
    """Return the value if it is an integer, else None."""
    return value if type(value) is int else None
