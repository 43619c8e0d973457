"""Build pairs of a preferred and a rejected answer from records with trl's columns.

Guarantees:
- Both answers of a pair follow the same prompt, and differ. With a chat template, an answer is all that the template
  writes after the prompt, as in trl.
- Prompt and answer are encoded together, and answers begin with the first token that is not the prompt's, as in trl.
- Without a prompt field, the prompt is the common beginning of both answers, as in trl.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from trainium_trainer.data.examples.chat import ChatFormat, require_chat
from trainium_trainer.data.examples.record_format import (
    BadRecordError,
    Example,
    GuardedText,
    RecordFormat,
    SpecialTokenGuard,
    build_pair,
    convert_to_text,
    list_fields,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainium_contract.trainer.examples import PreferenceConfig
    from trainium_trainer.data.sources.documents import Record

_WHERE = "data.examples.preference"
_TOOLS = "tools"
_Messages: TypeAlias = "list[dict[str, Any]]"


class PreferenceFormat(RecordFormat):
    """Builds pairs of examples, of text or by the chat template."""

    width = 2

    def __init__(self, config: PreferenceConfig, chat: ChatFormat | None, guard: SpecialTokenGuard) -> None:
        """Create the builder; `chat` builds examples from messages, None without a chat template."""
        super().__init__(guard)
        self._config = config
        self._chat = chat
        self._fields = frozenset((config.prompt_field, config.chosen_field, config.rejected_field, _TOOLS))

    def build_examples(self, record: Record) -> tuple[Example, ...]:
        """Build the examples of the preferred and the rejected answer."""
        return self._build_pair(record.fields)

    def find_unused_fields(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """Yield the fields that are neither a prompt, an answer nor tools."""
        yield from (name for name in fields if name not in self._fields)

    def _build_pair(self, record: Mapping[str, Any]) -> tuple[Example, Example]:
        answers = [self._answer(record, name) for name in (self._config.chosen_field, self._config.rejected_field)]
        chosen, rejected = map(_parse_messages, answers)
        if (chosen is None) != (rejected is None):
            raise BadRecordError("one answer is a text and the other a list of messages: write both alike")
        if chosen is not None and rejected is not None:
            prompt = self._find_prompt_messages(record, chosen, rejected)
            built = [self._build_conversation(record, prompt, answer) for answer in (chosen, rejected)]
        else:
            text, begin = self._find_prompt_text(record, *map(str, answers))
            built = [
                build_pair(self.guard.protect(text), self.guard.protect(str(answer)[begin:])) for answer in answers
            ]
        if built[0].text == built[1].text:
            raise BadRecordError("the two answers are equal, so neither is preferred: leave the record out")
        start = min(example.answers[0][0] for example in built)  # a template may write a prompt in part only
        if built[0].text[:start] != built[1].text[:start]:
            raise BadRecordError("the two answers follow different prompts: correct the record or the chat template")
        first, second = (
            replace(example, answers=((start, example.answers[0][1]),), encoded_whole=True) for example in built
        )
        return first, second

    def render_prompt(self, fields: Mapping[str, Any]) -> tuple[GuardedText, bool]:
        """Return the text or the rendered messages before both answers."""
        prompt = fields.get(self._config.prompt_field)
        messages = _parse_messages(prompt)
        if messages is None and _parse_messages(fields.get(self._config.chosen_field)) is None:
            if prompt is None:
                raise BadRecordError(self._create_missing_field_error(fields, self._config.prompt_field))
            return self.guard.protect(convert_to_text(prompt)), False
        if messages is None:
            return self._build_pair(fields)[0].prompt, True
        return self._require_chat().render_prompt(self._record(fields, messages))

    def record_of_prompt(self, text: str) -> dict[str, Any]:
        """Build a user's message if there is a chat template, else the text."""
        return {self._config.prompt_field: text if self._chat is None else [{"role": "user", "content": text}]}

    def _answer(self, record: Mapping[str, Any], field: str) -> Any:
        if record.get(field) is None:
            raise BadRecordError(self._create_missing_field_error(record, field))
        answer = record[field]
        if not isinstance(answer, str | list):
            raise BadRecordError(f"the field {field!r} is neither a text nor a list of messages")
        return answer

    @staticmethod
    def _create_missing_field_error(record: Mapping[str, Any], field: str) -> str:
        return f"has no field {field!r}, which {_WHERE} names ({list_fields(record, field)})"

    def _find_prompt_text(self, record: Mapping[str, Any], chosen: str, rejected: str) -> tuple[str, int]:
        """Return the prompt of two texts, and the start of the answers in them."""
        prompt = record.get(self._config.prompt_field)
        if isinstance(prompt, str):
            return prompt, 0
        if prompt is not None:
            raise BadRecordError("the prompt is no text but the answers are: write the prompt as text")
        common = itertools.takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
        common_prompt = "".join(one for one, _ in common).removesuffix(" ")  # an answer keeps its leading space
        if not common_prompt:
            raise BadRecordError(
                f"{self._create_missing_field_error(record, self._config.prompt_field)}, and the answers begin "
                "differently"
            )
        return common_prompt, len(common_prompt)

    def _find_prompt_messages(self, record: Mapping[str, Any], chosen: _Messages, rejected: _Messages) -> _Messages:
        """Return the messages before two answers, and reduce the two lists to the answers."""
        messages = _parse_messages(record.get(self._config.prompt_field))
        if messages is not None:
            return messages
        common = itertools.takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
        prompt = [one for one, _ in common]
        del chosen[: len(prompt)], rejected[: len(prompt)]
        if not prompt:
            raise BadRecordError("the two answers begin with different messages, and there is no prompt: give it")
        return prompt

    def _build_conversation(self, record: Mapping[str, Any], prompt: _Messages, answer: _Messages) -> Example:
        earlier = [message | {"weight": 0} if message.get("role") == "assistant" else message for message in prompt]
        return self._require_chat().build_example(self._record(record, [*earlier, *answer]), to_the_end=True)

    def _record(self, record: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {self._require_chat().field: list(messages), _TOOLS: record.get(_TOOLS)}

    def _require_chat(self) -> ChatFormat:
        return require_chat(self._chat, "data.format is Preference and the answers are messages")


def _parse_messages(value: Any) -> _Messages | None:
    """Return a list of messages, also from JSON in a table of texts; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if isinstance(value, list) and value and all(isinstance(message, dict) and "role" in message for message in value):
        return list(value)
    return None
