"""Prompts as a user gives them: texts, lines of a file, or records in JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Asked = str | dict[str, Any]
"""A text, or a record of which a template makes one."""
_PROMPT = "prompt"


def read_prompts(file: Path) -> list[Asked]:
    """The prompts of a file: of .jsonl each line is a text or a record, of any other each line that is not empty.

    Raises UserError, also when there is none.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--prompts {file}: cannot be read ({error.strerror}): give an existing file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {file}: is not UTF-8 text: write one prompt on each line") from error
    prompts = list(_records(file, text) if file.suffix == ".jsonl" else _lines(text))
    if not prompts:
        raise UserError(f"--prompts {file}: holds no prompt: write one on each line")
    return prompts


def plain_text(asked: Asked) -> str:
    """The prompt where no configuration says how one is made. Raises UserError."""
    if isinstance(asked, str):
        return asked
    if isinstance(asked.get(_PROMPT), str):
        return str(asked[_PROMPT])
    fields = ", ".join(map(repr, asked)) or "none"
    raise UserError(
        f"a record of --prompts has no text {_PROMPT!r} (its fields: {fields}): give --config, so that the template of "
        "the training makes the prompt"
    )


def _lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip())


def _records(file: Path, text: str) -> Iterator[Asked]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"--prompts {file} line {number}: not valid JSON ({error}): correct the line") from error
        if not isinstance(record, (str, dict)):
            raise UserError(
                f"--prompts {file} line {number}: is neither a text nor an object: write a text in quotes or an "
                "object with the fields of a record"
            )
        yield record
