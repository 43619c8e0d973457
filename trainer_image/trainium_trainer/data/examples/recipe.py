"""All that the examples of one source depend on, in a form that travels to worker processes.

Invariant: two recipes with one key make the same examples, on whatever machine; what cannot be right about templates,
tokenizer or function is refused when the recipe is made, before a record is read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.data import BosToken
from trainium_contract.trainer.examples import DataFormat, ExamplesConfig
from trainium_trainer.data.examples.forms.function import digest_of_function
from trainium_trainer.data.examples.forms.instruction import Templates, templates_of
from trainium_trainer.data.examples.forms.making import ExampleMaker
from trainium_trainer.data.tokens.encoding import SourceSpec
from trainium_trainer.data.tokens.tokenizer import Special, digest_of, special_of
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from trainium_contract.trainer.data import DataConfig

FORMAT = 1
_VERSION = 2
"""Of the way in which examples are made: stored ones of another are made again."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the records of a source become examples."""

    source: str
    format: DataFormat
    config: ExamplesConfig
    templates: Templates
    """Of format Instruction."""
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
        """What makes examples; `guarded` are the special tokens that stay text in a record. Raises UserError."""
        return ExampleMaker(self.format, self.config, self.templates, self.chat_template, self.special, guarded)

    def key(self, memo: Path | None) -> str:
        """Digest of all that the examples depend on. Raises UserError or StorageError."""
        config, form = self.config, self.format
        chats = form in (DataFormat.CHAT, DataFormat.FUNCTION)
        parts: dict[str, Any] = {
            "version": _VERSION,
            "source": self.spec.open().identity(memo),
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
        if self.bos is not BosToken.AUTO:
            parts["bos"] = self.bos
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def key_of_function(self) -> str | None:
        """Return the digest of the user's function; None for other formats. Raises UserError."""
        if self.format is not DataFormat.FUNCTION:
            return None
        assert self.config.function is not None
        return digest_of_function(self.config.function)


def recipe_of(config: DataConfig, source: str, tokenizer: Path | None) -> Recipe:
    """The recipe for one source. Raises UserError or StorageError."""
    examples = config.examples
    special = special_of(tokenizer) if tokenizer is not None else Special((), None)
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
    templates = templates_of(examples.template, source) if instruction else Templates(None, None, where)
    return Recipe(
        source=source,
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
