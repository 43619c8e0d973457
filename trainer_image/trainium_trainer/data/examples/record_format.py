"""Define the text of an example, and the interface of the formats that build it from a record.

Guarantees:
- The text of an example is the model's only input from the record.
- The learned parts are marked as ranges of the text, so that only the tokenizer decides where tokens begin.
- A record with half a surrogate pair, which JSON can hold, is refused.
"""

from __future__ import annotations

import difflib
import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trainium_trainer.data.sources.documents import Record


class BadRecordError(Exception):
    """A record cannot be used; the text is the reason, without the location."""


Range: TypeAlias = tuple[int, int]
"""Start and end in a text."""


@dataclass(frozen=True, slots=True)
class GuardedText:
    """A text, and the ranges of it that are encoded as text though they have the form of special tokens."""

    text: str
    plain: tuple[Range, ...] = ()

    def __add__(self, other: GuardedText) -> GuardedText:
        shift = len(self.text)
        return GuardedText(
            self.text + other.text, (*self.plain, *((start + shift, end + shift) for start, end in other.plain))
        )

    def slice_text(self, start: int = 0, end: int | None = None) -> GuardedText:
        """Return the text between two positions, neither of which is within a special token."""
        ranges = [(a - start, b - start) for a, b in self.plain if a >= start and (end is None or b <= end)]
        return GuardedText(self.text[start:end], tuple(ranges))

    def iterate_pieces(self) -> Iterator[tuple[int, str, bool]]:
        """Yield the position and the text of each piece, and whether its special tokens are encoded as text."""
        position = 0
        for start, end in (*self.plain, (len(self.text), len(self.text))):
            if start > position:
                yield position, self.text[position:start], False
            if end > start:
                yield start, self.text[start:end], True
            position = end


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer, or a whole conversation."""

    guarded: GuardedText
    answers: tuple[Range, ...]
    """The ranges of the text that the model learns to generate; at least one."""
    label: str | None = None
    """The name of the class."""
    from_chat_template: bool = False
    """Whether a chat template wrote the BOS prefix and the ends of the text; else the tokenizer's are added."""
    encoded_whole: bool = False
    """Whether prompt and answer are encoded together, so that a token across the border belongs to the answer."""
    unused: tuple[str, ...] = ()
    """The parts of the record that the text should have and has not."""

    def __post_init__(self) -> None:
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise BadRecordError("holds half a surrogate pair, which is no character: correct the line") from error

    @property
    def text(self) -> str:
        """The whole text."""
        return self.guarded.text

    @property
    def prompt(self) -> GuardedText:
        """The text before the last answer."""
        return self.guarded.slice_text(0, self.answers[-1][0])

    @property
    def answer(self) -> str:
        """The last answer."""
        start, end = self.answers[-1]
        return self.text[start:end]


def drop_nulls(value: Any) -> Any:
    """Return a value without null keys of dictionaries, with which tables fill in missing keys."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def build_pair(prompt: GuardedText, answer: GuardedText, label: str | None = None) -> Example:
    """Return an example of one prompt and one answer. Raises BadRecordError for an empty answer."""
    if not answer.text.strip():
        raise BadRecordError("the answer is empty: give it one, or leave the record out with data.examples.where")
    border = len(prompt.text)
    return Example(prompt + answer, ((border, border + len(answer.text)),), label)


MAX_NAMES = 8


class SpecialTokenGuard:
    """Keeps special tokens in a text of the data from being recognized as special."""

    def __init__(self, names: Iterable[str]) -> None:
        longest_first = sorted(set(names), key=lambda name: (-len(name), name))
        self.names = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        """Matches a guarded special token, and nothing without one."""

    def protect(self, text: str) -> GuardedText:
        """Return a text of the data, whose special tokens are encoded as text."""
        return GuardedText(text, tuple(match.span() for match in self.names.finditer(text)))


class RecordFormat(ABC):
    """Builds examples from records in one data.format."""

    width = 1
    """The number of examples per record: two for a pair of answers."""

    def __init__(self, guard: SpecialTokenGuard) -> None:
        self.guard = guard

    @abstractmethod
    def build_examples(self, record: Record) -> tuple[Example, ...]:
        """Return the examples of a record; empty if the function leaves it out. Raises BadRecordError, UserError."""

    @abstractmethod
    def render_prompt(self, fields: Mapping[str, Any]) -> tuple[GuardedText, bool]:
        """Return the prompt of a record without an answer, and whether it includes its BOS prefix.

        Raises BadRecordError, UserError.
        """

    @abstractmethod
    def record_of_prompt(self, text: str) -> dict[str, Any]:
        """Build a record that has only `text` as its prompt. Raises UserError if a prompt needs several fields."""

    @abstractmethod
    def find_unused_fields(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """Yield the fields of a record on which no example depends."""


def convert_to_text(value: Any) -> str:
    """Return a value as text, JSON unless it is a text."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def list_fields(record: Mapping[str, Any], missing: str) -> str:
    """List the fields of a record for a message, the most similar name first."""
    if not record:
        return "it has none: every record is a JSON object or a row"
    near = difflib.get_close_matches(missing, list(record), 1)
    names = [*near, *(name for name in record if name not in near)][:MAX_NAMES]
    return f"it has {', '.join(map(repr, names))}" + (", ..." if len(record) > MAX_NAMES else "")
