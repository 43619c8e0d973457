"""Build examples from records by the configured format; the recipe has everything on which they depend.

Guarantees:
- Two recipes with equal keys build the same examples on any machine.
- Invalid templates, tokenizers and functions are refused when the recipe is created, before a record is read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.data import BosToken, DataConfig
from trainium_contract.trainer.examples import DataFormat, ExamplesConfig
from trainium_trainer.data.examples.chat import CLOCK, ChatFormat, find_control_tokens, read_today
from trainium_trainer.data.examples.function import MESSAGES, FunctionFormat, digest_of_function
from trainium_trainer.data.examples.preference import PreferenceFormat
from trainium_trainer.data.examples.record_format import RecordFormat, SpecialTokenGuard
from trainium_trainer.data.examples.templates import ClassificationFormat, InstructionFormat, Templates, find_templates
from trainium_trainer.data.tokens.special_tokens import ChatTemplates, SpecialTokens, read_special_tokens
from trainium_trainer.data.tokens.tokenizer import find_tokenizer_file, hash_tokenizer
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Collection

    from trainium_trainer.data.sources.resolve import SourceSpec

FORMAT = 1
_VERSION = 3
"""The version of the encoding: stored examples of another version are encoded again."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings by which the records of a source become examples."""

    spec: SourceSpec
    format: DataFormat
    config: ExamplesConfig
    templates: Templates
    """The templates of format Instruction."""
    chat_templates: ChatTemplates
    special: SpecialTokens
    tokenizer: str | None
    """The `tokenizer.json`; None until one is trained on the examples."""
    sequence_length: int
    max_bad_lines: int | None
    bos: BosToken = BosToken.AUTO
    date: str | None = None
    """The date that a chat template asks for; None if it asks for none."""

    @property
    def max_tokens(self) -> int:
        """The maximum tokens of an example: the last one is only a target."""
        return self.sequence_length + 1

    def _find_control_tokens(self, specials: Collection[str]) -> set[str]:
        """Return the special tokens that are text in a record: those that begin or end texts and messages."""
        variables = dict(self.special.tokens)
        templates = [template for template in astuple(self.chat_templates) if template is not None]
        written = "\0".join(template or "" for template in (self.templates.prompt, self.templates.completion))
        control = {token for token in specials if token in self.special.ends or token in written}
        return control.union(*(find_control_tokens(template, specials, variables) for template in templates))

    def record_format(self, specials: Collection[str]) -> RecordFormat:
        """Create the builder of examples; `specials` are the tokenizer's special tokens. Raises UserError."""
        guard, config = SpecialTokenGuard(self._find_control_tokens(specials)), self.config
        if self.format is DataFormat.INSTRUCTION:
            return InstructionFormat(self.templates, guard)
        if self.format is DataFormat.CLASSIFICATION:
            return ClassificationFormat(config.classification, guard)
        chats, field, setting = self.format is DataFormat.CHAT, MESSAGES, "the chat template"
        if chats:
            field, template_file = config.chat.messages_field, config.chat.template
            setting = (
                f"data.examples.chat.template {template_file}" if template_file else "the tokenizer's chat template"
            )
        templates = self.chat_templates
        chat = (
            ChatFormat(templates, self.special, guard, field, setting, self.date)
            if templates != ChatTemplates()
            else None
        )
        if chats:
            assert chat is not None, "checked when the recipe was made"
            return chat
        if self.format is DataFormat.PREFERENCE:
            return PreferenceFormat(config.preference, chat, guard)
        assert config.function is not None
        return FunctionFormat(config.function, chat, guard)

    def compute_key(self, cache_folder: Path | None) -> str:
        """Return a digest of everything on which the examples depend. Raises UserError or StorageError."""
        config, form = self.config, self.format
        chats = form in (DataFormat.CHAT, DataFormat.FUNCTION, DataFormat.PREFERENCE)
        parts: dict[str, Any] = {
            "version": _VERSION,
            "source": self.spec.source.compute_identity(cache_folder),
            "format": form,
            "tokenizer": hash_tokenizer(Path(self.tokenizer)) if self.tokenizer is not None else None,
            "special": self.special.tokens,
            "template": [self.templates.prompt, self.templates.completion] if form is DataFormat.INSTRUCTION else None,
            "chat": [*astuple(self.chat_templates), config.chat.messages_field] if chats else None,
            "classification": config.classification.to_wire() if form is DataFormat.CLASSIFICATION else None,
            "function": self.compute_function_key(),
            "where": config.where,
            "loss": config.loss,
            "tooLong": config.too_long,
            "sequenceLength": self.sequence_length,
        }
        if self.date is not None:
            parts["date"] = self.date
        if form is DataFormat.PREFERENCE:
            parts["preference"] = config.preference.to_wire()
        if self.bos is not BosToken.AUTO:
            parts["bos"] = self.bos
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def compute_function_key(self) -> str | None:
        """Return the digest of the user's function; None for other formats. Raises UserError."""
        if self.format is not DataFormat.FUNCTION:
            return None
        assert self.config.function is not None
        return digest_of_function(self.config.function)


def build_recipe(config: DataConfig, spec: SourceSpec, tokenizer: Path | None) -> Recipe:
    """Create the recipe for one source. Raises UserError or StorageError."""
    examples = config.examples
    special = read_special_tokens(tokenizer) if tokenizer is not None else SpecialTokens(())
    chat_templates = _find_chat_templates(config, special)
    if config.format is DataFormat.CHAT and chat_templates == ChatTemplates():
        reason = f"beside {tokenizer} is none" if tokenizer is not None else "there is no tokenizer with one"
        raise UserError(
            f"data.format is Chat, which needs a chat template, but {reason}: give data.examples.chat.template, or the "
            "tokenizer of a model that was tuned for chats in data.tokenizer.path"
        )
    instruction = config.format is DataFormat.INSTRUCTION
    setting = "data.examples.template"
    templates = find_templates(examples.template, spec.name) if instruction else Templates(None, None, setting)
    return Recipe(
        spec=replace(spec.pin(), text_field=""),
        format=config.format,
        config=examples,
        templates=templates,
        chat_templates=chat_templates,
        special=special,
        tokenizer=str(tokenizer) if tokenizer is not None else None,
        sequence_length=config.sequence_length,
        max_bad_lines=config.max_bad_lines,
        bos=config.bos,
        date=(config.examples.chat.date or read_today()) if _has_clock(config, chat_templates) else None,
    )


def _find_chat_templates(config: DataConfig, special: SpecialTokens) -> ChatTemplates:
    """Return the chat templates of the data. Raises UserError."""
    if config.examples.chat.template is None:
        return special.chat_templates
    file = Path(config.examples.chat.template).expanduser()
    try:
        return ChatTemplates(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.examples.chat.template {file}: cannot be read ({error}): correct the path") from error


def _has_clock(config: DataConfig, templates: ChatTemplates) -> bool:
    """Return whether examples depend on the date."""
    chats = config.format in (DataFormat.CHAT, DataFormat.FUNCTION, DataFormat.PREFERENCE)
    return chats and any(CLOCK in template for template in astuple(templates) if template is not None)


def pin_date(config: DataConfig, date: str | None) -> DataConfig:
    """Return the configuration with a date if its examples depend on one and it has none. Raises UserError."""
    chat, tokenizer = config.examples.chat, config.tokenizer
    if chat.date is not None or config.format is DataFormat.TEXT:
        return config
    special = SpecialTokens(()) if tokenizer.path is None else read_special_tokens(find_tokenizer_file(tokenizer))
    if not _has_clock(config, _find_chat_templates(config, special)):
        return config
    dated = chat.model_copy(update={"date": date or read_today()})
    return config.model_copy(update={"examples": config.examples.model_copy(update={"chat": dated})})
