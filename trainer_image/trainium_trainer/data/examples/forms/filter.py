"""`data.examples.where`: only records whose fields have the given values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_trainer.data.examples.forms.fields import as_text

if TYPE_CHECKING:
    from collections.abc import Mapping

_REMEMBERED = 8


class Filter:
    """Decides which records are left, and remembers what the others had, for a sentence when none is."""

    def __init__(self, wanted: Mapping[str, str]) -> None:
        self._wanted = wanted
        self.found: dict[str, dict[str, None]] = {}
        """Some values of the fields that were asked for."""

    def __call__(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is left."""
        fits = True
        for field, value in self._wanted.items():
            if field not in record:
                fits = False
                continue
            text = as_text(record[field])
            seen = self.found.setdefault(field, {})
            if len(seen) < _REMEMBERED:
                seen[text[:80]] = None
            fits = fits and text == value
        return fits


def nothing_left(wanted: Mapping[str, str], found: Mapping[str, Mapping[str, None]], records: int) -> str:
    """Why no record is left, in one sentence."""
    for field, value in wanted.items():
        if field not in found:
            return f"none of the {records:,} records has the field {field!r}: correct data.examples.where"
        if value not in found[field]:
            values = ", ".join(found[field])
            return (
                f"of the {records:,} records none has {field}: {value} (found: {values}): correct data.examples.where"
            )
    pairs = ", ".join(f"{field}: {value}" for field, value in wanted.items())
    return f"of the {records:,} records none has {pairs} at once: correct data.examples.where"
