"""Build examples with templates: formats Instruction and Classification."""

from __future__ import annotations

import glob
import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.examples.record_format import (
    MAX_NAMES,
    BadRecordError,
    Example,
    GuardedText,
    RecordFormat,
    SpecialTokenGuard,
    build_pair,
    convert_to_text,
    list_fields,
)
from trainium_trainer.data.sources.files import HUB, S3, read_s3_file, read_with_retries
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_contract.trainer.examples import ClassificationConfig, TemplateConfig
    from trainium_trainer.data.sources.documents import Record


@dataclass(frozen=True, slots=True)
class Template:
    """A text with placeholders for fields."""

    setting: str
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
            raise BadRecordError(f"has nothing under {names}, which {self.setting} names: give it a value")
        text = GuardedText("")
        for literal, field in self.parts:
            text += GuardedText(literal)
            if field is not None:
                text += guard.protect(read_field(record, field, self.setting))
        return text


def parse_template(text: str, setting: str) -> Template:
    """Parse a template. Raises UserError."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UserError(f"{setting}: {error}: write {{{{ and }}}} for braces that are no field") from error
    for _, field, form, conversion in parts:
        if field is not None and (not field or form or conversion):
            raise UserError(
                f"{setting}: {{{field}{'!' + conversion if conversion else ''}{':' + form if form else ''}}} is no "
                "plain field: write {name of a field}, and {{ and }} for braces"
            )
    return Template(setting, tuple((literal, field) for literal, field, _, _ in parts))


def read_field(record: Mapping[str, Any], field: str, setting: str) -> str:
    """Return a field's value as text; a null is empty. Raises BadRecordError if the field is missing."""
    if field not in record:
        raise BadRecordError(f"has no field {field!r}, which {setting} names ({list_fields(record, field)})")
    return convert_to_text(record[field])


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
    setting: str
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
        name = f"{templates.setting}.prompt"
        self._prompt = parse_template(templates.prompt or _WITH_CONTEXT, name)
        self._short = parse_template(_WITHOUT_CONTEXT, name) if templates.prompt is None else None
        self._completion = parse_template(templates.completion or _COMPLETION, f"{templates.setting}.completion")
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

    def read_first() -> tuple[str, bytes] | None:
        for folder in (path, path.rpartition("/")[0]):
            name = f"{folder}/{TEMPLATE_FILE}"
            if folder and (text := read_s3_file(name)) is not None:
                return S3 + name, text
        return None

    return read_with_retries(f"{source}/{TEMPLATE_FILE}", read_first)


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
        classes = ", ".join(labels[:MAX_NAMES]) + (", ..." if len(labels) > MAX_NAMES else "")
        raise BadRecordError(f"the label {text!r} is neither one of {_WHERE}.labels ({classes}) nor the number of one")


def _parse_integer(text: str) -> int | None:
    """Parse a text as an integer, also 1.0; None for other texts."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None
