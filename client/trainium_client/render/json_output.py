"""Render `-o json`: the typed values with camelCase keys, for programs."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from typing import Any

_UNDERSCORE = re.compile(r"_([a-z0-9])")


def to_wire(value: Any) -> Any:
    """Convert a value to JSON types; keys of mappings are data and unchanged."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field_.name for field_ in fields(value) if field_.metadata.get("json", True)]
        return {to_camel_case(name): to_wire(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): to_wire(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_wire(item) for item in value]
    return value


def format_json(value: Any) -> str:
    """Return indented JSON with one line break at the end."""
    return json.dumps(to_wire(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_camel_case(name: str) -> str:
    """Convert snake_case to camelCase."""
    return _UNDERSCORE.sub(lambda match: match[1].upper(), name)
