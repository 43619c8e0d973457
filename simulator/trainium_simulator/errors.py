"""Describe invalid input in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class InputError(Exception):
    """A file, an option or a job that cannot be simulated; its text states what was wrong, where, and what to do."""


def describe_errors(error: ValidationError) -> str:
    """Return the first things that a model refused, each with its place, in one line."""
    parts = []
    for each in error.errors()[:3]:
        place = ".".join(str(step) for step in each["loc"])
        parts.append(f"{place}: {each['msg']}" if place else str(each["msg"]))
    more = error.error_count() - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
