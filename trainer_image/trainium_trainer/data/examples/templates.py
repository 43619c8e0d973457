"""Turn records into the text of examples with templates, and refuse records that cannot be used.

Guarantees:
- An example's text is all that the model sees of the record.
- What is learned of it is marked by stretches of that text, so that the tokenizer alone decides where tokens begin.
"""

from __future__ import annotations

import difflib
import glob
import json
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.sources.files import S3, read_with_retries, s3
from trainium_trainer.data.sources.hub import HUB
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trainium_contract.trainer.examples import ClassificationConfig, TemplateConfig


class BadRecordError(Exception):
    """A record that cannot be used; its text is the reason, without the place."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer, or a whole conversation."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Stretches of the text that the model is to generate; at least one."""
    label: str | None = None
    """Name of the class."""
    framed: bool = False
    """The text has its own beginning and ends, from a chat template; else the tokenizer's are put around it."""

    @property
    def prompt(self) -> str:
        """Text before the last answer."""
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


def build_pair(prompt: str, answer: str, label: str | None = None) -> Example:
    """Return an example of one prompt and one answer. Raises BadRecordError for an empty answer."""
    if not answer.strip():
        raise BadRecordError("the answer is empty: give it one, or leave the record out with data.examples.where")
    return Example(prompt + answer, ((len(prompt), len(prompt) + len(answer)),), label)


_FIRST_MARK = 0xF0000
_SHOWN = 8


class Guard:
    """Keeps special tokens that stand in somebody's text from being taken for such.

    Each is carried as one character of a private plane from the template to the tokenizer.
    """

    def __init__(self, specials: Iterable[str]) -> None:
        names = sorted(set(specials), key=lambda name: (-len(name), name))
        self._marks = {name: chr(_FIRST_MARK + number) for number, name in enumerate(names)}
        self._names = {mark: name for name, mark in self._marks.items()}
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._mark = re.compile(f"([{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + len(names) - 1)}])") if names else None

    def hide(self, text: str) -> str:
        """Return the text with a mark in place of each special token."""
        if self._special is None or not self._special.search(text):
            return text
        return self._special.sub(lambda found: self._marks[found.group()], text)

    def show(self, text: str) -> str:
        """Return the text as it was."""
        return "".join(piece for piece, _ in self.pieces(text))

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Stretches of a text with marks, as they were, and whether each is a special token that is to be text."""
        parts = self._mark.split(text) if self._mark is not None else [text]
        return [(self._names.get(part, part), part in self._names) for part in parts if part]

    def marked(self, text: str) -> bool:
        """Return whether the text has marks."""
        return self._mark is not None and self._mark.search(text) is not None


@dataclass(frozen=True, slots=True)
class Template:
    """Text with places for fields."""

    where: str
    """Its name in the configuration or file, for sentences."""
    parts: tuple[tuple[str, str | None], ...]
    """Literal text, and the field that follows it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields in their order, each once."""
        return tuple(dict.fromkeys(field for _, field in self.parts if field is not None))

    def render(self, record: Mapping[str, Any], guard: Guard) -> str:
        """Render the text for a record. Raises BadRecordError when a field is missing."""
        if self.fields and all(record.get(field, "") is None for field in self.fields):
            names = " and ".join(map(repr, self.fields))
            raise BadRecordError(f"has nothing under {names}, which {self.where} names: give it a value")
        text = []
        for literal, field in self.parts:
            text.append(literal)
            if field is not None:
                text.append(guard.hide(read_field(record, field, self.where)))
        return "".join(text)


def parse_template(text: str, where: str) -> Template:
    """Parse a template. Raises UserError."""
    try:
        found = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UserError(f"{where}: {error}: write {{{{ and }}}} for braces that are no field") from error
    for _, field, form, conversion in found:
        if field is not None and (not field or form or conversion):
            raise UserError(
                f"{where}: {{{field}{'!' + conversion if conversion else ''}{':' + form if form else ''}}} is no plain "
                "field: write {name of a field}, and {{ and }} for braces"
            )
    return Template(where, tuple((literal, field) for literal, field, _, _ in found))


def read_field(record: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field's value as text; a null is empty. Raises BadRecordError when the field is not there."""
    if field not in record:
        raise BadRecordError(f"has no field {field!r}, which {where} names ({list_fields(record, field)})")
    return as_text(record[field])


def as_text(value: Any) -> str:
    """Return a value as text: what is no text as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def list_fields(record: Mapping[str, Any], wanted: str) -> str:
    """Return the fields of a record, the nearest name first, for sentences."""
    if not record:
        return "it has none: every record is a JSON object or a row"
    near = difflib.get_close_matches(wanted, list(record), 1)
    names = [*near, *(name for name in record if name not in near)][:_SHOWN]
    return f"it has {', '.join(map(repr, names))}" + (", ..." if len(record) > _SHOWN else "")


_REMEMBERED = 8


class Filter:
    """Decides which records are left, and remembers what the others had, for a sentence when none is."""

    def __init__(self, wanted: Mapping[str, str]) -> None:
        self._wanted = wanted
        self.found: dict[str, dict[str, None]] = {}
        """Some values of the fields that were asked for."""

    def __call__(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record is kept."""
        fits = True
        for field, value in self._wanted.items():
            if field not in record:
                fits = False
                continue
            text = as_text(record[field])
            seen = self.found.setdefault(field, {})
            if len(seen) < _REMEMBERED:
                seen[text[:80]] = None
            fits = fits and text == value
        return fits


def explain_empty_filter(wanted: Mapping[str, str], found: Mapping[str, Mapping[str, None]], records: int) -> str:
    """Return the reason why no record is left, in one sentence."""
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
    """Texts of the templates that hold for a source; None: the built-in one."""

    prompt: str | None
    completion: str | None
    where: str
    """Their place, for sentences."""


class Instruction:
    """Makes examples from records."""

    def __init__(self, templates: Templates, guard: Guard) -> None:
        """Check the templates. Raises UserError."""
        self._guard = guard
        name = f"{templates.where}.prompt"
        self._prompt = parse_template(templates.prompt or _WITH_CONTEXT, name)
        self._short = parse_template(_WITHOUT_CONTEXT, name) if templates.prompt is None else None
        self._completion = parse_template(templates.completion or _COMPLETION, f"{templates.where}.completion")

    def example(self, record: Mapping[str, Any]) -> Example:
        """Build the example of a record. Raises BadRecordError."""
        return build_pair(self.prompt(record), self._completion.render(record, self._guard))

    def prompt(self, record: Mapping[str, Any]) -> str:
        """Build the prompt alone. Raises BadRecordError."""
        return self._template(record).render(record, self._guard)

    @property
    def fields(self) -> frozenset[str]:
        """Fields that an example depends on."""
        return frozenset((*self._prompt.fields, *self._completion.fields))

    def prompt_fields(self) -> tuple[str, ...]:
        """Return the fields that a prompt needs."""
        return (self._short or self._prompt).fields

    def _template(self, record: Mapping[str, Any]) -> Template:
        """Return the template of a record; the built-in one leaves an empty context out."""
        if self._short is not None and not as_text(record.get(_CONTEXT)).strip():
            return self._short
        return self._prompt


def find_templates(config: TemplateConfig, source: str) -> Templates:
    """Return the templates for a source. Raises UserError for a `template.json` that is none, StorageError."""
    if config.prompt is not None and config.completion is not None:
        return Templates(config.prompt, config.completion, "data.examples.template")
    found = _beside(source)
    if found is None:
        return Templates(config.prompt, config.completion, "data.examples.template")
    name, text = found
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


def _beside(source: str) -> tuple[str, bytes] | None:
    """`template.json` in the folder of a source, with its name."""
    if source.startswith(S3):
        return _beside_remote(source)
    if source.startswith(HUB):
        return None
    path = Path(source).expanduser()
    while glob.has_magic(str(path)):
        path = path.parent
    file = (path if path.is_dir() else path.parent) / TEMPLATE_FILE
    return (str(file), read_with_retries(str(file), file.read_bytes)) if file.is_file() else None


def _beside_remote(source: str) -> tuple[str, bytes] | None:
    from pyarrow import fs  # noqa: PLC0415 - only data in S3 pays for it

    path = source.removeprefix(S3).rstrip("/")
    while glob.has_magic(path):
        path = path.rpartition("/")[0]

    def content() -> tuple[str, bytes] | None:
        for folder in (path, path.rpartition("/")[0]):
            name = f"{folder}/{TEMPLATE_FILE}"
            if folder and s3().get_file_info(name).type == fs.FileType.File:
                with s3().open_input_file(name) as stream:
                    return S3 + name, bytes(stream.read())
        return None

    return read_with_retries(f"{source}/{TEMPLATE_FILE}", content)


_WHERE = "data.examples.classification"


class Classification:
    """Makes examples from records."""

    def __init__(self, config: ClassificationConfig, guard: Guard) -> None:
        """Check the template. Raises UserError."""
        self._config = config
        self._guard = guard
        if config.prompt is not None:
            self._prompt = parse_template(config.prompt, f"{_WHERE}.prompt")
        else:
            escaped = [(name.replace("{", "{{").replace("}", "}}"), name) for name in config.text_fields]
            lines = [f"{shown}: {{{name}}}\n" for shown, name in escaped]
            self._prompt = parse_template("".join(lines) + "label:", f"{_WHERE}.textFields")

    def example(self, record: Mapping[str, Any]) -> Example:
        """Build the example of a record. Raises BadRecordError."""
        prompt, label = self.prompt(record), self._label(record)
        return build_pair(prompt, label if prompt[-1:].isspace() else f" {label}", label)

    def prompt(self, record: Mapping[str, Any]) -> str:
        """Build the prompt alone. Raises BadRecordError."""
        return self._prompt.render(record, self._guard)

    @property
    def fields(self) -> frozenset[str]:
        """Fields that an example depends on."""
        return frozenset((*self._prompt.fields, self._config.label_field))

    def prompt_fields(self) -> tuple[str, ...]:
        """Return the fields that a prompt needs."""
        return self._prompt.fields

    def _label(self, record: Mapping[str, Any]) -> str:
        field, labels = self._config.label_field, self._config.labels
        if field not in record:
            raise BadRecordError(
                f"has no field {field!r}, which {_WHERE}.labelField names ({list_fields(record, field)})"
            )
        value = record[field]
        text = as_text(value).strip()
        if text in labels:
            return text
        number = int(value) if isinstance(value, bool) else _whole(text)
        if number is not None and 0 <= number < len(labels):
            return labels[number]
        known = ", ".join(labels[:_SHOWN]) + (", ..." if len(labels) > _SHOWN else "")
        raise BadRecordError(f"the label {text!r} is neither one of {_WHERE}.labels ({known}) nor the number of one")


def _whole(text: str) -> int | None:
    """Return the number that a text is, 1.0 as well as 1."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None
