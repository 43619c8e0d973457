"""Turn records into the text of examples with templates, and refuse records that cannot be used.

Guarantees:
- The text of an example is the model's only input from the record.
- The learned parts are marked as ranges of the text, so that only the tokenizer decides where tokens begin.
- A record with half a surrogate pair, which JSON can hold, is refused.
"""

from __future__ import annotations

import difflib
import glob
import json
import re
import string
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trainium_trainer.data.sources.files import HUB, S3, read_s3_file, read_with_retries
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trainium_contract.trainer.examples import ClassificationConfig, TemplateConfig
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


_MAX_NAMES = 8


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


@dataclass(frozen=True, slots=True)
class Template:
    """A text with placeholders for fields."""

    where: str
    """The name in the configuration or file, for messages."""
    parts: tuple[tuple[str, str | None], ...]
    """Literal texts, each with the field that follows it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The distinct fields in their order."""
        return tuple(dict.fromkeys(field for _, field in self.parts if field is not None))

    def render(self, record: Mapping[str, Any], guard: SpecialTokenGuard) -> GuardedText:
        """Render the text for a record. Raises BadRecordError when a field is missing."""
        if self.fields and all(record.get(field, "") is None for field in self.fields):
            names = " and ".join(map(repr, self.fields))
            raise BadRecordError(f"has nothing under {names}, which {self.where} names: give it a value")
        text = GuardedText("")
        for literal, field in self.parts:
            text += GuardedText(literal)
            if field is not None:
                text += guard.protect(read_field(record, field, self.where))
        return text


def parse_template(text: str, where: str) -> Template:
    """Parse a template. Raises UserError."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UserError(f"{where}: {error}: write {{{{ and }}}} for braces that are no field") from error
    for _, field, form, conversion in parts:
        if field is not None and (not field or form or conversion):
            raise UserError(
                f"{where}: {{{field}{'!' + conversion if conversion else ''}{':' + form if form else ''}}} is no plain "
                "field: write {name of a field}, and {{ and }} for braces"
            )
    return Template(where, tuple((literal, field) for literal, field, _, _ in parts))


def read_field(record: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field's value as text; a null is empty. Raises BadRecordError if the field is missing."""
    if field not in record:
        raise BadRecordError(f"has no field {field!r}, which {where} names ({list_fields(record, field)})")
    return convert_to_text(record[field])


def convert_to_text(value: Any) -> str:
    """Return a value as text, JSON unless it is a text."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def list_fields(record: Mapping[str, Any], wanted: str) -> str:
    """List the fields of a record for a message, the most similar name first."""
    if not record:
        return "it has none: every record is a JSON object or a row"
    near = difflib.get_close_matches(wanted, list(record), 1)
    names = [*near, *(name for name in record if name not in near)][:_MAX_NAMES]
    return f"it has {', '.join(map(repr, names))}" + (", ..." if len(record) > _MAX_NAMES else "")


_MAX_REMEMBERED_VALUES = 8


class RecordFilter:
    """Decides which records are kept, and records values of the others for the error if none is kept."""

    def __init__(self, wanted: Mapping[str, str]) -> None:
        self._wanted = wanted
        self.found: dict[str, dict[str, None]] = {}
        """Some values of the fields of the filter."""

    def __call__(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record is kept."""
        fits = True
        for field, value in self._wanted.items():
            if field not in record:
                fits = False
                continue
            text = convert_to_text(record[field])
            seen = self.found.setdefault(field, {})
            if len(seen) < _MAX_REMEMBERED_VALUES:
                seen[text[:80]] = None
            fits = fits and text == value
        return fits


def explain_empty_filter(wanted: Mapping[str, str], found: Mapping[str, Mapping[str, None]], records: int) -> str:
    """Return the reason why no record is kept."""
    for field, value in wanted.items():
        if field not in found:
            return f"none of the {records:,} records has the field {field!r}: correct data.examples.where"
        if value not in found[field]:
            values = ", ".join(found[field])
            return (
                f"of the {records:,} records none has {field}: {value} (found: {values}): correct data.examples.where"
            )
    pairs = ", ".join(f"{field}: {value}" for field, value in wanted.items())
    return f"of the {records:,} records none has {pairs} at once: correct data.examples.where"


TEMPLATE_FILE = "template.json"
_CONTEXT = "context"
_WITH_CONTEXT = "### Instruction\n{instruction}\n\n### Context\n{context}\n\n### Answer\n"
_WITHOUT_CONTEXT = "### Instruction\n{instruction}\n\n### Answer\n"
_COMPLETION = "{response}"


@dataclass(frozen=True, slots=True)
class Templates:
    """The texts of a source's templates; None: the built-in one."""

    prompt: str | None
    completion: str | None
    where: str
    """Their location, for messages."""


class _TemplateFormat(RecordFormat):
    """Builds examples of a rendered prompt and an answer."""

    fields: frozenset[str]
    """The fields on which an example depends."""
    _prompt: Template

    def render_prompt(self, fields: Mapping[str, Any]) -> tuple[GuardedText, bool]:
        """Render the template."""
        return self._choose_template(fields).render(fields, self.guard), False

    def record_of_prompt(self, text: str) -> dict[str, Any]:
        """Return the field of a template that has a single one."""
        names = self._choose_template({}).fields
        if len(names) != 1:
            raise UserError(
                f"a prompt of this data.format needs the fields {', '.join(names)}: give a JSON object with them"
            )
        return {names[0]: text}

    def find_unused_fields(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """Yield the fields that neither the prompt nor the answer has."""
        yield from (name for name in fields if name not in self.fields)

    def _choose_template(self, record: Mapping[str, Any]) -> Template:  # noqa: ARG002 - for a form with two templates
        return self._prompt


class InstructionFormat(_TemplateFormat):
    """Builds examples by templates of prompt and completion."""

    def __init__(self, templates: Templates, guard: SpecialTokenGuard) -> None:
        """Check the templates. Raises UserError."""
        super().__init__(guard)
        name = f"{templates.where}.prompt"
        self._prompt = parse_template(templates.prompt or _WITH_CONTEXT, name)
        self._short = parse_template(_WITHOUT_CONTEXT, name) if templates.prompt is None else None
        self._completion = parse_template(templates.completion or _COMPLETION, f"{templates.where}.completion")
        self.fields = frozenset((*self._prompt.fields, *self._completion.fields))

    def build_examples(self, record: Record) -> tuple[Example, ...]:
        """Render both templates."""
        prompt, _ = self.render_prompt(record.fields)
        return (build_pair(prompt, self._completion.render(record.fields, self.guard)),)

    def _choose_template(self, record: Mapping[str, Any]) -> Template:
        """Return the template of a record; the built-in one leaves an empty context out."""
        if self._short is not None and not convert_to_text(record.get(_CONTEXT)).strip():
            return self._short
        return self._prompt


def find_templates(config: TemplateConfig, source: str) -> Templates:
    """Return the templates of a source. Raises UserError for an invalid `template.json`, and StorageError."""
    if config.prompt is not None and config.completion is not None:
        return Templates(config.prompt, config.completion, "data.examples.template")
    template = _read_template_file(source)
    if template is None:
        return Templates(config.prompt, config.completion, "data.examples.template")
    name, text = template
    try:
        document = json.loads(text)
        prompt, completion = document["prompt"], document["completion"]
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise TypeError  # noqa: TRY301 - one sentence for all that it is not
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{name}: is no template: write an object with the texts `prompt` and `completion`, or give "
            "data.examples.template"
        ) from error
    return Templates(config.prompt or prompt, config.completion or completion, name)


def _read_template_file(source: str) -> tuple[str, bytes] | None:
    """Read the `template.json` in the folder of a source; return it with its name."""
    if source.startswith(S3):
        return _read_remote_template(source)
    if source.startswith(HUB):
        return None
    path = Path(source).expanduser()
    while glob.has_magic(str(path)):
        path = path.parent
    file = (path if path.is_dir() else path.parent) / TEMPLATE_FILE
    return (str(file), read_with_retries(str(file), file.read_bytes)) if file.is_file() else None


def _read_remote_template(source: str) -> tuple[str, bytes] | None:
    path = source.removeprefix(S3).rstrip("/")
    while glob.has_magic(path):
        path = path.rpartition("/")[0]

    def content() -> tuple[str, bytes] | None:
        for folder in (path, path.rpartition("/")[0]):
            name = f"{folder}/{TEMPLATE_FILE}"
            if folder and (text := read_s3_file(name)) is not None:
                return S3 + name, text
        return None

    return read_with_retries(f"{source}/{TEMPLATE_FILE}", content)


_WHERE = "data.examples.classification"


class ClassificationFormat(_TemplateFormat):
    """Builds examples of a text and its class."""

    def __init__(self, config: ClassificationConfig, guard: SpecialTokenGuard) -> None:
        """Check the template. Raises UserError."""
        super().__init__(guard)
        self._config = config
        if config.prompt is not None:
            self._prompt = parse_template(config.prompt, f"{_WHERE}.prompt")
        else:
            escaped = [(name.replace("{", "{{").replace("}", "}}"), name) for name in config.text_fields]
            lines = [f"{shown}: {{{name}}}\n" for shown, name in escaped]
            self._prompt = parse_template("".join(lines) + "label:", f"{_WHERE}.textFields")
        self.fields = frozenset((*self._prompt.fields, config.label_field))

    def build_examples(self, record: Record) -> tuple[Example, ...]:
        """Render the template and find the class."""
        (prompt, _), label = self.render_prompt(record.fields), self._label(record.fields)
        answer = label if prompt.text[-1:].isspace() else f" {label}"
        return (build_pair(prompt, GuardedText(answer), label),)

    def _label(self, record: Mapping[str, Any]) -> str:
        field, labels = self._config.label_field, self._config.labels
        if field not in record:
            raise BadRecordError(
                f"has no field {field!r}, which {_WHERE}.labelField names ({list_fields(record, field)})"
            )
        value = record[field]
        text = convert_to_text(value).strip()
        if text in labels:
            return text
        number = int(value) if isinstance(value, bool) else _parse_integer(text)
        if number is not None and 0 <= number < len(labels):
            return labels[number]
        classes = ", ".join(labels[:_MAX_NAMES]) + (", ..." if len(labels) > _MAX_NAMES else "")
        raise BadRecordError(f"the label {text!r} is neither one of {_WHERE}.labels ({classes}) nor the number of one")


def _parse_integer(text: str) -> int | None:
    """Parse a text as an integer, also 1.0; None for other texts."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None
