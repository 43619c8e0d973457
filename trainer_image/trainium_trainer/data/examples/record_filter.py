"""Keep the records that `data.examples.where` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_trainer.data.examples.record_format import convert_to_text

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_REMEMBERED_VALUES = 8


class RecordFilter:
    """Decides which records are kept, and records values of the others for the error if none is kept."""

    def __init__(self, conditions: Mapping[str, str]) -> None:
        self._conditions = conditions
        self.seen_values: dict[str, dict[str, None]] = {}
        """Some values of the fields of the filter."""

    def __call__(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record is kept."""
        fits = True
        for field, value in self._conditions.items():
            if field not in record:
                fits = False
                continue
            text = convert_to_text(record[field])
            seen = self.seen_values.setdefault(field, {})
            if len(seen) < _MAX_REMEMBERED_VALUES:
                seen[text[:80]] = None
            fits = fits and text == value
        return fits


def explain_empty_filter(
    conditions: Mapping[str, str], seen_values: Mapping[str, Mapping[str, None]], records: int
) -> str:
    """Return the reason why no record is kept."""
    for field, value in conditions.items():
        if field not in seen_values:
            return f"none of the {records:,} records has the field {field!r}: correct data.examples.where"
        if value not in seen_values[field]:
            values = ", ".join(seen_values[field])
            return (
                f"of the {records:,} records none has {field}: {value} (found: {values}): correct data.examples.where"
            )
    pairs = ", ".join(f"{field}: {value}" for field, value in conditions.items())
    return f"of the {records:,} records none has {pairs} at once: correct data.examples.where"
