"""What a record becomes before it is tokenised, and why it may not.

Invariant: an example's text is all that the model sees of the record; what is learned of it is told by stretches of
that text, so that the tokenizer alone decides where tokens begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class BadRecordError(Exception):
    """A record that cannot be used; its text is the reason, without the place."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer, or a whole conversation."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Stretches of the text that the model is to say; at least one."""
    label: str | None = None
    """The word of the class."""
    framed: bool = False
    """The text has its own beginning and ends, from a chat template; else the tokenizer's are put around it."""

    @property
    def prompt(self) -> str:
        """What stands before the last answer."""
        return self.text[: self.answers[-1][0]]

    @property
    def answer(self) -> str:
        """The last answer."""
        start, end = self.answers[-1]
        return self.text[start:end]


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its dictionaries that are null, as tables fill in keys that are missing."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def answered(prompt: str, answer: str, label: str | None = None) -> Example:
    """An example of one prompt and one answer. Raises BadRecordError for an empty answer."""
    if not answer.strip():
        raise BadRecordError("the answer is empty: give it one, or leave the record out with data.examples.where")
    return Example(prompt + answer, ((len(prompt), len(prompt) + len(answer)),), label)
