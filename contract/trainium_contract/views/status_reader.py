"""The status of a job as JSON, read as leniently as `raw.py` does, but only what people are shown of it.

A part knows the model that its fields are from, and mypy refuses any other name (`scripts/mypy_contract.py`), so
that no view, page or command reads the operator's memory (`status/internal.py`), and none misspells a field. Invariant:
without that plugin the code means the same and is only checked less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainium_contract.views.raw import mapping, number, numbers, objects, text, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.base import MessageModel
    from trainium_contract.status.public import PublicStatus

_M = TypeVar("_M", bound="MessageModel")


class StatusReader(Generic[_M]):
    """A part of a status whose fields are those of a model; `field` is a name on the wire."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def __bool__(self) -> bool:
        """Return whether anything is in it."""
        return bool(self._raw)

    def text(self, field: str) -> str:
        """Return a string; empty when there is none."""
        return text(self._raw, field)

    def number(self, field: str) -> float | None:
        """Return a finite number; None when there is none."""
        return number(self._raw, field)

    def whole(self, field: str, default: int = 0) -> int:
        """Return a whole number."""
        return whole(self._raw, field, default)

    def numbers(self, field: str) -> dict[str, float]:
        """Return an object of numbers; other entries are left out."""
        return numbers(self._raw, field)

    def wholes(self, field: str) -> list[int]:
        """Return the whole numbers of a list."""
        found = self._raw.get(field)
        return [each for each in found if isinstance(each, int)] if isinstance(found, list) else []

    def has_list(self, field: str) -> bool:
        """Return whether there is a list, be it empty."""
        return isinstance(self._raw.get(field), list)

    def part(self, field: str) -> StatusReader[Any]:
        """Return an object, empty when there is none; mypy knows its model."""
        return StatusReader(mapping(self._raw, field))

    def parts(self, field: str) -> list[StatusReader[Any]]:
        """Return the objects of a list; mypy knows their model."""
        return [StatusReader(each) for each in objects(self._raw, field)]


def public_status(job: Mapping[str, Any]) -> StatusReader[PublicStatus]:
    """Return the public status of a TrainingJob as the API server holds it."""
    return StatusReader(mapping(job, "status"))
