"""Format Instruction: the templates of prompt and completion, from the configuration, `template.json` or built in."""

from __future__ import annotations

import glob
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.examples.forms.example import Example, answered
from trainium_trainer.data.examples.forms.fields import Guard, Template, as_text, parsed
from trainium_trainer.data.sources.files import S3, reading, s3
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.trainer.examples import TemplateConfig

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
    """Where they were found, for sentences."""


class Instruction:
    """Makes examples from records."""

    def __init__(self, templates: Templates, guard: Guard) -> None:
        """Check the templates. Raises UserError."""
        self._guard = guard
        name = f"{templates.where}.prompt"
        self._prompt = parsed(templates.prompt or _WITH_CONTEXT, name)
        self._short = parsed(_WITHOUT_CONTEXT, name) if templates.prompt is None else None
        self._completion = parsed(templates.completion or _COMPLETION, f"{templates.where}.completion")

    def example(self, record: Mapping[str, Any]) -> Example:
        """The example of a record. Raises BadRecordError."""
        return answered(self.prompt(record), self._completion.render(record, self._guard))

    def prompt(self, record: Mapping[str, Any]) -> str:
        """The prompt alone. Raises BadRecordError."""
        return self._template(record).render(record, self._guard)

    @property
    def fields(self) -> frozenset[str]:
        """Fields that an example depends on."""
        return frozenset((*self._prompt.fields, *self._completion.fields))

    def prompt_fields(self) -> tuple[str, ...]:
        """What a record must have for a prompt."""
        return (self._short or self._prompt).fields

    def _template(self, record: Mapping[str, Any]) -> Template:
        """The built-in template leaves an empty context out."""
        if self._short is not None and not as_text(record.get(_CONTEXT)).strip():
            return self._short
        return self._prompt


def templates_of(config: TemplateConfig, source: str) -> Templates:
    """The templates for a source. Raises UserError for a `template.json` that is none, StorageError."""
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
    path = Path(source).expanduser()
    while glob.has_magic(str(path)):
        path = path.parent
    file = (path if path.is_dir() else path.parent) / TEMPLATE_FILE
    return (str(file), reading(str(file), file.read_bytes)) if file.is_file() else None


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

    return reading(f"{source}/{TEMPLATE_FILE}", content)
