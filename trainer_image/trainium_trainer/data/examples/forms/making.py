"""From a record to its example, by the format that the configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from trainium_contract.trainer.examples import DataFormat
from trainium_trainer.data.examples.forms.chat import Chat
from trainium_trainer.data.examples.forms.classification import Classification
from trainium_trainer.data.examples.forms.example import BadRecordError, Example, answered
from trainium_trainer.data.examples.forms.fields import Guard
from trainium_trainer.data.examples.forms.function import Caller
from trainium_trainer.data.examples.forms.instruction import Instruction
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_contract.trainer.examples import ChatConfig, ExamplesConfig
    from trainium_trainer.data.examples.forms.instruction import Templates
    from trainium_trainer.data.sources.documents import Record
    from trainium_trainer.data.tokens.tokenizer import Special

_MESSAGES = "messages"


class _Form(Protocol):
    """One format."""

    def example(self, record: Mapping[str, Any]) -> Example: ...

    def prompt(self, record: Mapping[str, Any]) -> str: ...


class ExampleMaker:
    """Makes examples from records."""

    def __init__(
        self,
        form: DataFormat,
        config: ExamplesConfig,
        templates: Templates,
        chat_template: str | None,
        special: Special,
        guarded: tuple[str, ...],
    ) -> None:
        """Check templates and load the function. Raises UserError."""
        self.guard = Guard(guarded)
        self._format = form
        self._caller: Caller | None = None
        self._form: _Form | None = None
        match form:
            case DataFormat.INSTRUCTION:
                self._form = Instruction(templates, self.guard)
            case DataFormat.CLASSIFICATION:
                self._form = Classification(config.classification, self.guard)
            case DataFormat.CHAT:
                assert chat_template is not None
                self._form = _chat(chat_template, special, self.guard, config.chat)
            case DataFormat.FUNCTION:
                assert config.function is not None
                self._caller = Caller(config.function)
                if chat_template is not None:
                    self._form = Chat(chat_template, special, self.guard, _MESSAGES, "the chat template")
            case DataFormat.TEXT:
                raise AssertionError

    def example(self, record: Record) -> Example | None:
        """The example of a record; None when the function leaves it out. Raises BadRecordError, UserError."""
        example = self._example(record)
        try:
            if example is not None:
                example.text.encode()
        except UnicodeEncodeError as error:  # as \ud800 in JSON
            raise BadRecordError("holds half a surrogate pair, which is no character: correct the line") from error
        return example

    def _example(self, record: Record) -> Example | None:
        if self._caller is None:
            assert self._form is not None
            return self._form.example(record.fields)
        result = self._caller(record.fields, record)
        if result is None:
            return None
        if _MESSAGES in result:
            return self._chatting().example(result)
        return answered(result["prompt"], result["completion"])

    def unused(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Yield what a record holds that no example depends on; a function may use all of it."""
        if isinstance(self._form, Chat) and self._caller is None:
            yield from self._form.unused(record)
        elif isinstance(self._form, (Instruction, Classification)):
            yield from (name for name in record if name not in self._form.fields)

    def prompt(self, fields: Mapping[str, Any]) -> tuple[str, bool]:
        """The prompt for a record without an answer, and whether it has its own beginning.

        Raises BadRecordError, UserError.
        """
        if self._caller is None:
            assert self._form is not None
            return self._form.prompt(fields), self._format is DataFormat.CHAT
        result = self._caller(fields)
        if result is None:
            raise BadRecordError("data.examples.function leaves the record out")
        if _MESSAGES in result:
            return self._chatting().prompt(result), True
        return str(result["prompt"]), False

    def prompt_of_text(self, text: str) -> dict[str, Any]:
        """A record that has nothing but `text` to ask. Raises UserError where that needs several fields."""
        form = self._form if self._caller is None else None
        if isinstance(form, Chat):
            return {form.field: [{"role": "user", "content": text}]}
        names = form.prompt_fields() if isinstance(form, (Instruction, Classification)) else ()
        if len(names) != 1:
            needed = f"the fields {', '.join(names)}" if names else "the fields of data.examples.function"
            raise UserError(f"a prompt of this data.format needs {needed}: give a JSON object with them")
        return {names[0]: text}

    def _chatting(self) -> _Form:
        if self._form is None:
            raise UserError(
                "data.examples.function returned messages, but there is no chat template: give "
                "data.examples.chat.template, or the tokenizer of a model that was tuned for chats"
            )
        return self._form


def _chat(template: str, special: Special, guard: Guard, config: ChatConfig) -> Chat:
    where = f"data.examples.chat.template {config.template}" if config.template else "the tokenizer's chat template"
    return Chat(template, special, guard, config.messages_field, where)
