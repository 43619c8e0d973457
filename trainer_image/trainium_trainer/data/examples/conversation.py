"""Find the assistant's messages in the text that a chat template gives a conversation.

Guarantees:
- A message is found by rendering the conversation up to it, or with another content in its place, and only where both
  leave the rest of the text as it is. Otherwise the record is refused.
- Every character may occur in a record.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.examples.record_format import BadRecordError, GuardedText, Range, SpecialTokenGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; templates read the first."""
START_OF_REASONING, END_OF_REASONING = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation."""

    guarded: GuardedText
    generated: tuple[Range, ...]
    """The ranges of the text that `{% generation %}` encloses."""

    @property
    def text(self) -> str:
        """The text."""
        return self.guarded.text


class Marks:
    """Characters that stand for something else while a template is applied, none of which its texts have.

    The first two enclose what `{% generation %}` encloses, the third is a probe, and each of the others stands for a
    special token of the data that is encoded as text.
    """

    def __init__(self, guard: SpecialTokenGuard, used: Container[str]) -> None:
        """Choose characters beside the `used` ones. Raises BadRecordError if there are none."""
        self.names = guard.names
        self._free = (mark for mark in map(chr, range(0x10FFFF, 0xFFFF, -1)) if mark not in used)
        self._tokens: dict[str, str] = {}
        self.opening, self.closing, self.probe = self._take(), self._take(), self._take()

    def _take(self) -> str:
        if (mark := next(self._free, None)) is None:
            raise BadRecordError("uses every character there is, so that no chat template can be applied: shorten it")
        return mark

    @property
    def characters(self) -> str:
        """All marks."""
        return "".join((self.opening, self.closing, self.probe, *self._tokens))

    def escape(self, value: Any) -> Any:
        """Replace special tokens in the texts of a value by marks."""
        if isinstance(value, dict):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.escape(item) for item in value]
        return self.names.sub(lambda match: self._mark_of(match.group()), value) if isinstance(value, str) else value

    def _mark_of(self, token: str) -> str:
        mark = next((mark for mark, known_token in self._tokens.items() if known_token == token), None) or self._take()
        self._tokens[mark] = token
        return mark

    def resolve(self, text: str) -> Rendered:
        """Return the text with special tokens in place of their marks, and what the other marks enclose."""
        parts, plain, generated, position, start = list[str](), list[Range](), list[Range](), 0, 0
        for part in re.split(f"([{self.characters}])", text):
            if part == self.opening:
                start = position
            elif part == self.closing:
                generated.append((start, position))
            else:
                token = self._tokens.get(part, part)
                if part in self._tokens:
                    plain.append((position, position + len(token)))
                parts.append(token)
                position += len(token)
        return Rendered(GuardedText("".join(parts), tuple(plain)), tuple(generated))


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages and tools of one record, with marks for special tokens."""

    apply: Callable[..., str]
    """Applies the template."""
    messages: list[dict[str, Any]]
    tools: Any
    marks: Marks

    def render(self, count: int, *, prompt: bool = False) -> Rendered:
        """Render the first messages, with `prompt` up to where an answer begins. Raises BadRecordError."""
        marked = self.apply(self.messages[:count], self.tools, self.marks.characters, prompt=prompt)
        return self.marks.resolve(marked)

    def answer_range(self, number: int, text: str) -> Range:
        """Return the range of the answer in message `number` within the whole text. Raises BadRecordError."""
        around = self._render_around(self.messages, number)
        start = self._find_start(number, text, around)
        end = self._find_end(number, text, start, around)
        if start < 0 or end < start:
            raise BadRecordError(
                "the chat template changes what comes before an answer once it is given, so that the answer cannot be "
                "found: put {% generation %} and {% endgeneration %} around it in your template "
                "(data.examples.chat.template)"
            )
        return start, end

    def _render_part(self, count: int, *, prompt: bool = False) -> str | None:
        """Render the first messages; None if the template refuses them without the others."""
        try:
            return self.render(count, prompt=prompt).text
        except BadRecordError:
            return None

    def _render_around(self, messages: list[dict[str, Any]], number: int) -> tuple[str, str] | None:
        """Return what the template writes before and after the content of a message; None if that is unknown.

        It is found by another content in its place.
        """
        fields = {name: value for name, value in messages[number].items() if name not in REASONING_FIELDS}
        changed = [*messages[:number], fields | {"content": self.marks.probe}, *messages[number + 1 :]]
        try:
            marked = self.apply(changed, self.tools, self.marks.characters, prompt=False)
        except BadRecordError:
            return None
        before, probe, after = self.marks.resolve(marked).text.partition(self.marks.probe)
        return (before, after) if probe else None

    def _find_start(self, number: int, text: str, around: tuple[str, str] | None) -> int:
        """Return the end of the prompt or, where a prompt ends otherwise, of the message's header; -1 if unknown.

        The end of a reasoning that the prompt opened belongs to the answer, also if the template writes it always.
        """
        prompt = self._render_part(number, prompt=True)
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        header = text[: count_common(around[0], text)] if around else ""
        if not (prompt or "").endswith(" "):  # a blank after the header belongs to the first token of the answer
            header = header.rstrip(" ")
        question = self.messages[number - 1].get("content") if number else None
        question = self.marks.resolve(question).text.strip() if isinstance(question, str) else ""
        if around is None or question not in header:
            return -1
        earlier = self._render_part(number)
        if prompt is None or earlier is None or not prompt.startswith(earlier):
            return len(header)
        opening = prompt[len(earlier) :]
        position = header.rfind(opening, header.rfind(question) + len(question)) if opening and question else -1
        if position >= 0:
            return position + len(opening)
        common = count_common(prompt, text)
        opened = text.startswith(earlier) and common > len(earlier) and END_OF_REASONING in header[common:]
        return common if opened else len(header)

    def _find_end(self, number: int, text: str, start: int, around: tuple[str, str] | None) -> int:
        """Return the end of an answer, without whitespace after its turn; 0 if it is unknown."""
        after = self._render_part(number + 1)
        if after is not None and text.startswith(after.rstrip()):
            return max(start, len(after.rstrip()))
        if around is not None and text.endswith(around[1]):
            end = len(text) - len(around[1])
            return end + self._measure_turn_end(number, around[1])
        return 0 if after is None else self._find_same_end(text, start, after.rstrip())

    def _measure_turn_end(self, number: int, following: str) -> int:
        """Return the length of what ends the turn of a message, of the text that follows its content."""
        alone = self._render_around(self.messages[: number + 1], number)
        ending = alone[1].rstrip() if alone else ""
        if alone and following.startswith(ending):
            return len(ending)
        common = count_common(following, ending)  # the last turn can have another end
        tokens = [match for match in self.marks.names.finditer(following) if match.end() <= common]
        token = tokens[-1] if tokens else self.marks.names.match(following)
        return token.end() if token else 0

    def _find_same_end(self, text: str, start: int, ending: str) -> int:
        """Return the end of an answer that is also the end of another text; 0 if there is none."""
        if end := _find_common_end(text, start, ending):
            return end
        last_token = [match for match in self.marks.names.finditer(ending) if match.end() == len(ending)]
        end = _find_common_end(text, start, ending[: last_token[0].start()].rstrip()) if last_token else 0
        turn_end = self.marks.names.match(text, end)
        return turn_end.end() if end and turn_end is not None else end


def count_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of characters or tokens with which both begin."""
    equal = itertools.takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
    return sum(1 for _ in equal)


def _find_common_end(text: str, start: int, ending: str) -> int:
    """Return the last position up to which the text from `start` on is what `ending` ends with; 0 if there is none."""
    last = min(len(text), start + len(ending))
    ends = (end for end in range(last, start, -1) if text[end - 1] == ending[-1])
    return next((end for end in ends if ending.endswith(text[start:end])), 0)
