"""Templates with `{field}` places, and the values of a record's fields as text.

Invariants: a template is checked before a record is read; a value is put in as it is, and what looks like a special
token in it stays text (`Guard`).
"""

from __future__ import annotations

import difflib
import json
import re
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.examples.forms.example import BadRecordError
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_FIRST_MARK = 0xF0000
_SHOWN = 8


class Guard:
    """Keeps special tokens that stand in somebody's text from being taken for such.

    Each is carried as one character of a private plane from the template to the tokenizer.
    """

    def __init__(self, specials: Iterable[str]) -> None:
        names = sorted(set(specials), key=lambda name: (-len(name), name))
        self._marks = {name: chr(_FIRST_MARK + number) for number, name in enumerate(names)}
        self._names = {mark: name for name, mark in self._marks.items()}
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._mark = re.compile(f"([{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + len(names) - 1)}])") if names else None

    def hide(self, text: str) -> str:
        """The text with a mark in place of each special token."""
        if self._special is None or not self._special.search(text):
            return text
        return self._special.sub(lambda found: self._marks[found.group()], text)

    def show(self, text: str) -> str:
        """The text as it was."""
        return "".join(piece for piece, _ in self.pieces(text))

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Stretches of a text with marks, as they were, and whether each is a special token that is to be text."""
        parts = self._mark.split(text) if self._mark is not None else [text]
        return [(self._names.get(part, part), part in self._names) for part in parts if part]

    def marked(self, text: str) -> bool:
        """Whether the text has marks."""
        return self._mark is not None and self._mark.search(text) is not None


@dataclass(frozen=True, slots=True)
class Template:
    """Text with places for fields."""

    where: str
    """What the configuration or file calls it, for sentences."""
    parts: tuple[tuple[str, str | None], ...]
    """Literal text, and the field that follows it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields in their order, each once."""
        return tuple(dict.fromkeys(field for _, field in self.parts if field is not None))

    def render(self, record: Mapping[str, Any], guard: Guard) -> str:
        """The text for a record. Raises BadRecordError when a field is not there."""
        if self.fields and all(record.get(field, "") is None for field in self.fields):
            names = " and ".join(map(repr, self.fields))
            raise BadRecordError(f"has nothing under {names}, which {self.where} names: give it a value")
        text = []
        for literal, field in self.parts:
            text.append(literal)
            if field is not None:
                text.append(guard.hide(text_of(record, field, self.where)))
        return "".join(text)


def parsed(text: str, where: str) -> Template:
    """A template from its text. Raises UserError."""
    try:
        found = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UserError(f"{where}: {error}: write {{{{ and }}}} for braces that are no field") from error
    for _, field, form, conversion in found:
        if field is not None and (not field or form or conversion):
            raise UserError(
                f"{where}: {{{field}{'!' + conversion if conversion else ''}{':' + form if form else ''}}} is no plain "
                "field: write {name of a field}, and {{ and }} for braces"
            )
    return Template(where, tuple((literal, field) for literal, field, _, _ in found))


def text_of(record: Mapping[str, Any], field: str, where: str) -> str:
    """A field's value as text; a null is empty. Raises BadRecordError when the field is not there."""
    if field not in record:
        raise BadRecordError(f"has no field {field!r}, which {where} names ({known_fields(record, field)})")
    return as_text(record[field])


def as_text(value: Any) -> str:
    """A value as text: what is no text as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def known_fields(record: Mapping[str, Any], wanted: str) -> str:
    """The fields that there are, the nearest name first, for sentences."""
    if not record:
        return "it has none: every record is a JSON object or a row"
    near = difflib.get_close_matches(wanted, list(record), 1)
    names = [*near, *(name for name in record if name not in near)][:_SHOWN]
    return f"it has {', '.join(map(repr, names))}" + (", ..." if len(record) > _SHOWN else "")
