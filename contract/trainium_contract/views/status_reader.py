"""Read the public status of a job from JSON, as leniently as `raw.py`.

A part knows the model of its fields, and mypy refuses any other name (`scripts/mypy_contract.py`). So no view, page or
command reads the operator's state (`status/internal.py`), and none misspells a field.

Invariant: without that plugin the code behaves the same and is only checked less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainium_contract.views.raw import read_integer, read_mapping, read_number, read_numbers, read_objects, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.base import MessageModel
    from trainium_contract.status.public import PublicStatus

_M = TypeVar("_M", bound="MessageModel")


class StatusReader(Generic[_M]):
    """A part of a status with the fields of a model; `field` is a name on the wire."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def __bool__(self) -> bool:
        """Return whether it has any field."""
        return bool(self._raw)

    def read_text(self, field: str) -> str:
        """Return a string; empty when there is none."""
        return read_text(self._raw, field)

    def read_number(self, field: str) -> float | None:
        """Return a finite number; None when there is none."""
        return read_number(self._raw, field)

    def read_integer(self, field: str, default: int = 0) -> int:
        """Return a whole number."""
        return read_integer(self._raw, field, default)

    def read_numbers(self, field: str) -> dict[str, float]:
        """Return an object of numbers; other entries are left out."""
        return read_numbers(self._raw, field)

    def read_integers(self, field: str) -> list[int]:
        """Return the integers of a list."""
        values = self._raw.get(field)
        return [item for item in values if isinstance(item, int)] if isinstance(values, list) else []

    def has_list(self, field: str) -> bool:
        """Return whether there is a list, even an empty one."""
        return isinstance(self._raw.get(field), list)

    def read_part(self, field: str) -> StatusReader[Any]:
        """Return an object, empty if there is none; mypy knows its model."""
        return StatusReader(read_mapping(self._raw, field))

    def read_parts(self, field: str) -> list[StatusReader[Any]]:
        """Return the objects of a list; mypy knows their model."""
        return [StatusReader(item) for item in read_objects(self._raw, field)]


def read_public_status(job: Mapping[str, Any]) -> StatusReader[PublicStatus]:
    """Return the public status of a TrainingJob as the API server holds it."""
    return StatusReader(read_mapping(job, "status"))
