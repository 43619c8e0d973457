"""`trainer.data.format` and its options: from records (rows, JSON objects) to examples of prompt and answer.

Invariant: the samples depend on every field, so none may change between runs of one history.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel, MatchesPattern

_Path = Annotated[str, Field(min_length=1, max_length=1024)]
_Column = Annotated[str, Field(min_length=1, max_length=128)]
_Word = Annotated[str, Field(min_length=1, max_length=128)]
_Template = Annotated[str, Field(min_length=1, max_length=8192)]

_Date = Annotated[
    str,
    Field(max_length=10),
    MatchesPattern(r"[0-9]{4}-[01][0-9]-[0-3][0-9]", "write a date, for instance 2026-01-31"),
]
_Function = Annotated[
    str,
    Field(min_length=3, max_length=1024),
    MatchesPattern(
        r".+:[A-Za-z_][A-Za-z0-9_]*", "write module:name or /path/file.py:name, for instance my_package.records:read"
    ),
]


class DataFormat(StrEnum):
    """Kind of a source's records."""

    TEXT = "Text"
    """Running text: all of it is trained on, in samples of equal length."""
    INSTRUCTION = "Instruction"
    """A prompt and its answer, built from the record's fields by a template."""
    CHAT = "Chat"
    """A list of messages with roles, rendered by the tokenizer's chat template."""
    CLASSIFICATION = "Classification"
    """One or two texts and a label, whose word is the answer."""
    FUNCTION = "Function"
    """An example that a user's function builds from the record."""
    PREFERENCE = "Preference"
    """A prompt with two answers, one of which is preferred; for `tuning.objective`."""


class LossOn(StrEnum):
    """Tokens of an example that are trained on."""

    ANSWER = "Answer"
    """Those of the answer and its end; in a chat those of the assistant."""
    ALL = "All"
    """All of them."""


class TooLong(StrEnum):
    """Treatment of an example that is longer than a sequence; each kind is counted."""

    DROP = "Drop"
    CUT_LEFT = "CutLeft"
    """The start of the prompt is cut, never the answer; an example that would lose its whole prompt is dropped."""
    CUT_RIGHT = "CutRight"
    """The end of the example is cut; one without a token left to train on is dropped."""


class TemplateConfig(ContractModel):
    """Templates of prompt and answer; `{field}` stands for a field, `{{` and `}}` for braces."""

    prompt: _Template | None = None
    """Omitted: `template.json` beside the data if it exists, else the built-in instruction template, with the sections
    Instruction, Context (left out if empty) and Answer."""
    completion: _Template | None = None
    """Omitted: as `prompt`; the built-in one is `{response}`."""


class ChatConfig(ContractModel):
    """Format Chat."""

    messages_field: _Column = "messages"
    """Field with the list of messages, each with `role` and `content`; in CSV such a list as JSON."""
    template: _Path | None = None
    """A Jinja file; omitted: the chat template of the tokenizer, for records with tools the one named `tool_use`."""
    date: _Date | None = None
    """The date for templates that call `strftime_now`; omitted: the day on which the run started first."""


class ClassificationConfig(ContractModel):
    """Format Classification."""

    text_fields: Annotated[tuple[_Column, ...], Field(min_length=1, max_length=4)] = ("question", "sentence")
    """Fields of the texts, in the order of the prompt."""
    label_field: _Column = "label"
    """Field of the label: a number (place in `labels`) or one of its words."""
    labels: Annotated[tuple[_Word, ...], Field(min_length=2, max_length=1000)] = ("entailment", "not_entailment")
    """Names of the labels 0, 1, 2, ..."""
    prompt: _Template | None = None
    """Template of the prompt over the fields; omitted: each text on a separate line after its name, then `label:`. The
    label's word follows a space, unless the prompt ends with one or with a line break."""


class PreferenceConfig(ContractModel):
    """Format Preference; the default names are those of trl. Answers are texts or lists of messages.

    Without a prompt, or with messages that repeat it, the prompt is the common prefix of both answers.
    """

    prompt_field: _Column = "prompt"
    """Field of the prompt: a text or a list of messages."""
    chosen_field: _Column = "chosen"
    """Field of the preferred answer."""
    rejected_field: _Column = "rejected"
    """Field of the other answer."""


class ExamplesConfig(ContractModel):
    """Conversion of records to examples, for every format but Text."""

    template: TemplateConfig = TemplateConfig()
    """Format Instruction."""
    chat: ChatConfig = ChatConfig()
    """Format Chat."""
    classification: ClassificationConfig = ClassificationConfig()
    """Format Classification."""
    preference: PreferenceConfig = PreferenceConfig()
    """Format Preference."""
    function: _Function | None = None
    """Format Function: `module:name` or `/path/file.py:name`, called with each record; it returns a dictionary with
    `prompt` and `completion`, or with `messages`, or None to leave the record out. The file's bytes are part of what
    the samples depend on; files that it imports are not."""
    where: Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=16)] = {}
    """Only records whose fields have these values, compared as text (what is no text as JSON: `true`, `1`)."""
    loss: LossOn = LossOn.ANSWER
    """Tokens that are trained on."""
    packing: bool = False
    """Put several examples into one sequence; otherwise each has a separate sequence."""
    mask_examples: bool = True
    """Keep packed examples apart: none attends to another, and each starts at position 0. False: they are joined after
    each other's end tokens, and attend to those before them."""
    too_long: TooLong = TooLong.DROP
    """Treatment of examples that are longer than a sequence."""
