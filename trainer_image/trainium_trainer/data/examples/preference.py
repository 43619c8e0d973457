"""Build pairs of a preferred and another answer from records with trl's columns.

Guarantees:
- Both answers of a pair follow the same prompt, and differ.
- A prompt that is not given is what both answers begin with, as trl has it.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, TypeAlias

from trainium_trainer.data.examples.templates import BadRecordError, Example, Guard, as_text, build_pair, list_fields
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.trainer.examples import PreferenceConfig
    from trainium_trainer.data.examples.chat import Chat

_WHERE = "data.examples.preference"
_TOOLS = "tools"
_Messages: TypeAlias = "list[dict[str, Any]]"


class Preference:
    """Builds pairs of examples, of text or by the chat template."""

    def __init__(self, config: PreferenceConfig, chat: Chat | None, guard: Guard) -> None:
        """`chat` builds examples from messages; None where there is no chat template."""
        self._config = config
        self._chat = chat
        self._guard = guard
        self.fields = frozenset((config.prompt_field, config.chosen_field, config.rejected_field, _TOOLS))
        """Fields that an example depends on."""

    def pair(self, record: Mapping[str, Any]) -> tuple[Example, Example]:
        """Build the examples of the preferred and of the other answer. Raises BadRecordError, UserError."""
        answers = [self._answer(record, name) for name in (self._config.chosen_field, self._config.rejected_field)]
        chosen, rejected = map(_messages, answers)
        if (chosen is None) != (rejected is None):
            raise BadRecordError("one answer is a text and the other a list of messages: write both alike")
        if chosen is not None and rejected is not None:
            prompt = self._prompt_messages(record, chosen, rejected)
            built = [self._conversation(record, prompt, answer) for answer in (chosen, rejected)]
        else:
            text, begin = self._prompt_text(record, *map(str, answers))
            built = [build_pair(self._guard.hide(text), self._guard.hide(str(answer)[begin:])) for answer in answers]
        if built[0].text == built[1].text:
            raise BadRecordError("the two answers are equal, so neither is preferred: leave the record out")
        start = built[0].answers[0][0]
        if built[1].answers[0][0] != start or built[0].text[:start] != built[1].text[:start]:
            raise BadRecordError("the two answers follow different prompts: correct the record or the chat template")
        return built[0], built[1]

    def prompt(self, record: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the prompt, and whether a chat template wrote it. Raises BadRecordError, UserError."""
        given = record.get(self._config.prompt_field)
        messages = _messages(given)
        if messages is None and _messages(record.get(self._config.chosen_field)) is None:
            if given is None:
                raise BadRecordError(self._missing(record, self._config.prompt_field))
            return self._guard.hide(as_text(given)), False
        if messages is None:
            return self.pair(record)[0].prompt, True
        return self._chatting().prompt(self._record(record, messages)), True

    def ask(self, text: str) -> dict[str, Any]:
        """Return a record that asks a text: as a user's message where there is a chat template."""
        return {self._config.prompt_field: text if self._chat is None else [{"role": "user", "content": text}]}

    def _answer(self, record: Mapping[str, Any], field: str) -> Any:
        if record.get(field) is None:
            raise BadRecordError(self._missing(record, field))
        answer = record[field]
        if not isinstance(answer, str | list):
            raise BadRecordError(f"the field {field!r} is neither a text nor a list of messages")
        return answer

    @staticmethod
    def _missing(record: Mapping[str, Any], field: str) -> str:
        return f"has no field {field!r}, which {_WHERE} names ({list_fields(record, field)})"

    def _prompt_text(self, record: Mapping[str, Any], chosen: str, rejected: str) -> tuple[str, int]:
        """Return the prompt of two texts, and where the answers begin in them."""
        given = record.get(self._config.prompt_field)
        if isinstance(given, str):
            return given, 0
        if given is not None:
            raise BadRecordError("the prompt is no text but the answers are: write the prompt as text")
        alike = itertools.takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
        prompt = "".join(one for one, _ in alike).removesuffix(" ")  # an answer's first word keeps its blank
        if not prompt:
            raise BadRecordError(
                f"{self._missing(record, self._config.prompt_field)}, and the answers begin differently"
            )
        return prompt, len(prompt)

    def _prompt_messages(self, record: Mapping[str, Any], chosen: _Messages, rejected: _Messages) -> _Messages:
        """Return the messages before two answers, and leave only the answers in their lists."""
        given = _messages(record.get(self._config.prompt_field))
        if given is not None:
            return given
        alike = itertools.takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
        prompt = [one for one, _ in alike]
        del chosen[: len(prompt)], rejected[: len(prompt)]
        if not prompt:
            raise BadRecordError("the two answers begin with different messages, and there is no prompt: give it")
        return prompt

    def _conversation(self, record: Mapping[str, Any], prompt: _Messages, answer: _Messages) -> Example:
        earlier = [message | {"weight": 0} if message.get("role") == "assistant" else message for message in prompt]
        return self._chatting().example(self._record(record, [*earlier, *answer]))

    def _record(self, record: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {self._chatting().field: list(messages), _TOOLS: record.get(_TOOLS)}

    def _chatting(self) -> Chat:
        if self._chat is None:
            raise UserError(
                "data.format is Preference and the answers are messages, but there is no chat template: give "
                "data.examples.chat.template, or the tokenizer of a model that was tuned for chats"
            )
        return self._chat


def _messages(value: Any) -> _Messages | None:
    """Return a list of messages, also as JSON in a table of texts; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return list(value)
    return None
