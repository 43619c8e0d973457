"""Build examples from records by the configured format, with all that the examples of a source depend on.

Guarantees:
- Two recipes with one key make the same examples on any machine.
- Invalid templates, tokenizers and functions are refused when the recipe is made, before a record is read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainium_contract.trainer.data import BosToken, DataConfig
from trainium_contract.trainer.examples import ChatConfig, DataFormat, ExamplesConfig
from trainium_trainer.data.examples.chat import Chat
from trainium_trainer.data.examples.function import Caller, digest_of_function
from trainium_trainer.data.examples.preference import Preference
from trainium_trainer.data.examples.templates import (
    BadRecordError,
    Classification,
    Example,
    Guard,
    Instruction,
    Templates,
    build_pair,
    find_templates,
)
from trainium_trainer.data.sources.hub import pin_revision
from trainium_trainer.data.sources.resolve import SourceSpec
from trainium_trainer.data.tokens.tokenizer import Special, digest_of, read_special_tokens
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_trainer.data.sources.documents import Record


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
        self._form: _Form | Preference | None = None
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
            case DataFormat.PREFERENCE:
                chat = None
                if chat_template is not None:
                    chat = Chat(chat_template, special, self.guard, _MESSAGES, "the chat template")
                self._form = Preference(config.preference, chat, self.guard)
            case DataFormat.TEXT:
                raise AssertionError

    @property
    def width(self) -> int:
        """Examples of a record: the preferred and the other answer of a pair."""
        return 2 if self._format is DataFormat.PREFERENCE else 1

    def examples(self, record: Record) -> tuple[Example, ...]:
        """Return the examples of a record; none when the function leaves it out. Raises BadRecordError, UserError."""
        examples = self._examples(record)
        try:
            for example in examples:
                example.text.encode()
        except UnicodeEncodeError as error:  # as \ud800 in JSON
            raise BadRecordError("holds half a surrogate pair, which is no character: correct the line") from error
        return examples

    def _examples(self, record: Record) -> tuple[Example, ...]:
        if isinstance(self._form, Preference):
            return self._form.pair(record.fields)
        if self._caller is None:
            assert self._form is not None
            return (self._form.example(record.fields),)
        result = self._caller(record.fields, record)
        if result is None:
            return ()
        if _MESSAGES in result:
            return (self._chatting().example(result),)
        return (build_pair(result["prompt"], result["completion"]),)

    def unused(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Yield what a record holds that no example depends on; a function may use all of it."""
        if isinstance(self._form, Chat) and self._caller is None:
            yield from self._form.unused(record)
        elif isinstance(self._form, (Instruction, Classification, Preference)):
            yield from (name for name in record if name not in self._form.fields)

    def prompt(self, fields: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the prompt for a record without an answer, and whether it has its own beginning.

        Raises BadRecordError, UserError.
        """
        if isinstance(self._form, Preference):
            return self._form.prompt(fields)
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
        """Return a record that has nothing but `text` to ask. Raises UserError where that needs several fields."""
        form = self._form if self._caller is None else None
        if isinstance(form, Chat):
            return {form.field: [{"role": "user", "content": text}]}
        if isinstance(form, Preference):
            return form.ask(text)
        names = form.prompt_fields() if isinstance(form, (Instruction, Classification)) else ()
        if len(names) != 1:
            needed = f"the fields {', '.join(names)}" if names else "the fields of data.examples.function"
            raise UserError(f"a prompt of this data.format needs {needed}: give a JSON object with them")
        return {names[0]: text}

    def _chatting(self) -> _Form:
        if not isinstance(self._form, Chat):
            raise UserError(
                "data.examples.function returned messages, but there is no chat template: give "
                "data.examples.chat.template, or the tokenizer of a model that was tuned for chats"
            )
        return self._form


def _chat(template: str, special: Special, guard: Guard, config: ChatConfig) -> Chat:
    where = f"data.examples.chat.template {config.template}" if config.template else "the tokenizer's chat template"
    return Chat(template, special, guard, config.messages_field, where)


FORMAT = 1
_VERSION = 2
"""Of the way in which examples are made: stored ones of another are made again."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings by which the records of a source become examples."""

    source: str
    format: DataFormat
    config: ExamplesConfig
    templates: Templates
    """Used by format Instruction."""
    chat_template: str | None
    special: Special
    tokenizer: str | None
    """The `tokenizer.json`; None while one is still to be trained on the examples."""
    sequence_length: int
    max_bad_lines: int | None
    bos: BosToken = BosToken.AUTO

    @property
    def spec(self) -> SourceSpec:
        """The source."""
        return SourceSpec(self.source, "")

    @property
    def most(self) -> int:
        """Tokens of the longest example: the last one is only predicted."""
        return self.sequence_length + 1

    def maker(self, guarded: tuple[str, ...]) -> ExampleMaker:
        """Return the builder of examples; `guarded`: special tokens that stay text in a record. Raises UserError."""
        return ExampleMaker(self.format, self.config, self.templates, self.chat_template, self.special, guarded)

    def key(self, memo: Path | None) -> str:
        """Digest of all that the examples depend on. Raises UserError or StorageError."""
        config, form = self.config, self.format
        chats = form in (DataFormat.CHAT, DataFormat.FUNCTION, DataFormat.PREFERENCE)
        parts: dict[str, Any] = {
            "version": _VERSION,
            "source": self.spec.source.identity(memo),
            "format": form,
            "tokenizer": digest_of(Path(self.tokenizer)) if self.tokenizer is not None else None,
            "special": self.special.tokens,
            "template": [self.templates.prompt, self.templates.completion] if form is DataFormat.INSTRUCTION else None,
            "chat": [self.chat_template, config.chat.messages_field] if chats else None,
            "classification": config.classification.to_wire() if form is DataFormat.CLASSIFICATION else None,
            "function": self.key_of_function(),
            "where": config.where,
            "loss": config.loss,
            "tooLong": config.too_long,
            "sequenceLength": self.sequence_length,
        }
        if form is DataFormat.PREFERENCE:
            parts["preference"] = config.preference.to_wire()
        if self.bos is not BosToken.AUTO:
            parts["bos"] = self.bos
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def key_of_function(self) -> str | None:
        """Return the digest of the user's function; None for other formats. Raises UserError."""
        if self.format is not DataFormat.FUNCTION:
            return None
        assert self.config.function is not None
        return digest_of_function(self.config.function)


def build_recipe(config: DataConfig, source: str, tokenizer: Path | None) -> Recipe:
    """Return the recipe for one source. Raises UserError or StorageError."""
    examples = config.examples
    special = read_special_tokens(tokenizer) if tokenizer is not None else Special((), None)
    chat_template = special.chat_template
    if examples.chat.template is not None:
        file = Path(examples.chat.template).expanduser()
        try:
            chat_template = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"data.examples.chat.template {file}: cannot be read ({error}): correct the path"
            ) from error
    if config.format is DataFormat.CHAT and chat_template is None:
        beside = f"beside {tokenizer} is none" if tokenizer is not None else "there is no tokenizer with one"
        raise UserError(
            f"data.format is Chat, which needs a chat template, but {beside}: give data.examples.chat.template, or the "
            "tokenizer of a model that was tuned for chats in data.tokenizer.path"
        )
    instruction = config.format is DataFormat.INSTRUCTION
    where = "data.examples.template"
    templates = find_templates(examples.template, source) if instruction else Templates(None, None, where)
    return Recipe(
        source=pin_revision(source),
        format=config.format,
        config=examples,
        templates=templates,
        chat_template=chat_template,
        special=special,
        tokenizer=str(tokenizer) if tokenizer is not None else None,
        sequence_length=config.sequence_length,
        max_bad_lines=config.max_bad_lines,
        bos=config.bos,
    )
