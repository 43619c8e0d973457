"""Read JSON of an older or a newer operator: a missing part or one of another type is empty.

Invariant: text has no control characters, so nothing that a pod or a person wrote can control a terminal; and no halves
of surrogate pairs, which no terminal, page or file can represent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def strip_control_characters(text: str) -> str:
    """Remove control characters and halves of surrogate pairs from a text, except line breaks and tabs."""
    return _CONTROL.sub("", text)


def read_text(source: Any, key: str) -> str:
    """Return a string; empty when there is none."""
    value = source.get(key) if isinstance(source, Mapping) else None
    return strip_control_characters(value) if isinstance(value, str) else ""


def read_number(source: Any, key: str) -> float | None:
    """Return a finite number; None when there is none."""
    value = source.get(key) if isinstance(source, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:  # JSON's integers are unbounded
        return None
    return result if math.isfinite(result) else None


def read_integer(source: Any, key: str, default: int = 0) -> int:
    """Return an integer; `default` if there is none."""
    value = read_number(source, key)
    return default if value is None else int(value)


def read_mapping(source: Any, key: str) -> Mapping[str, Any]:
    """Return an object; empty when there is none."""
    value = source.get(key) if isinstance(source, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def read_objects(source: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the objects of a list."""
    value = source.get(key) if isinstance(source, Mapping) else None
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def read_numbers(source: Any, key: str) -> dict[str, float]:
    """Return an object of numbers; other entries are left out."""
    entries = read_mapping(source, key)
    return {
        strip_control_characters(str(name)): value
        for name in entries
        if (value := read_number(entries, name)) is not None
    }
