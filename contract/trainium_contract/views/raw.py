"""Reading JSON that an older or a newer operator may have written: what is missing or of another type is empty.

Invariant: text has no control characters, so nothing that a pod or a person wrote can steer a terminal; and no halves
of surrogate pairs, which no terminal, page or file can be given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """Remove control characters and halves of surrogate pairs from a text; line breaks and tabs stay."""
    return _CONTROL.sub("", text)


def text(of: Any, key: str) -> str:
    """Return a string; empty when there is none."""
    value = of.get(key) if isinstance(of, Mapping) else None
    return plain(value) if isinstance(value, str) else ""


def number(of: Any, key: str) -> float | None:
    """Return a finite number; None when there is none."""
    value = of.get(key) if isinstance(of, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # JSON's whole numbers have no end
        return None
    return found if math.isfinite(found) else None


def whole(of: Any, key: str, default: int = 0) -> int:
    """Return a whole number."""
    value = number(of, key)
    return default if value is None else int(value)


def mapping(of: Any, key: str) -> Mapping[str, Any]:
    """Return an object; empty when there is none."""
    value = of.get(key) if isinstance(of, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def objects(of: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the objects of a list."""
    value = of.get(key) if isinstance(of, Mapping) else None
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def numbers(of: Any, key: str) -> dict[str, float]:
    """Return an object of numbers; other entries are left out."""
    found = mapping(of, key)
    return {plain(str(name)): value for name in found if (value := number(found, name)) is not None}


def seconds_of(stamp: str) -> float | None:
    """Return Unix seconds of an RFC 3339 time; None for any other text."""
    try:
        found = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
