"""Describe invalid input in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class InputError(Exception):
    """An invalid file, option or job; the text states what is wrong, where, and what to do."""


def describe_errors(error: ValidationError) -> str:
    """Return the first three errors of a model, each with the path of its field, on one line."""
    parts = []
    for detail in error.errors()[:3]:
        field_path = ".".join(str(part) for part in detail["loc"])
        parts.append(f"{field_path}: {detail['msg']}" if field_path else str(detail["msg"]))
    omitted = error.error_count() - len(parts)
    return "; ".join(parts) + (f"; and {omitted} more" if omitted > 0 else "")
