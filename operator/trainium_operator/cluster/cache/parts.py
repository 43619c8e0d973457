"""Parts of an object's raw JSON as they should be: what is missing or of another type is empty, and hides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainium_operator.cluster.api.client import Json

LONGEST_NAME = 253
"""Characters of an object's name that the API server takes; a cloud's id of a machine is far shorter."""


def mapping_of(value: Any) -> Json:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def items_of(value: Any) -> list[Json]:
    """Return the objects of a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def text_of(value: Any) -> str:
    """Return the value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def name_of(value: Any) -> str:
    """Return the name of an object or a machine; empty for what is longer than a name can be."""
    name = text_of(value)
    return name if len(name) <= LONGEST_NAME else ""


def texts_of(value: Any) -> dict[str, str]:
    """Return the texts of an object; other entries are left out."""
    return {key: text for key, text in mapping_of(value).items() if isinstance(text, str)}


def whole_of(value: Any) -> int | None:
    """Return the value if it is a whole number, else None."""
    return value if type(value) is int else None
