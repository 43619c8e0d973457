"""Open the source that `data.source` names (files, those of a data set of the hub, Python's documentation), by format.

Guarantees:
- The blocks of a file, read in order, give what the file gives in one piece: every line and row belongs to exactly one
  block, a line to the block in which it begins.
- Nothing is read as a whole that can be read in parts.
- Documents and records are read by the same code.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_trainer.data.sources import lines, tables
from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Record, Skipped, TextPiece
from trainium_trainer.data.sources.files import DataFile, find_files, read_with_retries
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_KEYS_SHOWN = 8


def divide(file: DataFile, number: int, target: int) -> list[FileBlock]:
    """Return the blocks of a file, about `target` bytes each. Raises UserError or StorageError."""
    if file.size == 0:
        return []
    match file.format:
        case ".parquet":
            return read_with_retries(file.shown, lambda: tables.divide_parquet(file, number, target))
        case ".arrow":
            return read_with_retries(file.shown, lambda: tables.divide_arrow(file, number, target))
    if file.compression is not None:
        return [FileBlock(number, 0, file.size, file.size * 4)]
    if file.format == ".csv" or lines.is_array(file):
        return [FileBlock(number, 0, file.size, file.size)]
    count = max(1, round(file.size / target))
    marks = [index * file.size // count for index in range(count + 1)]
    return [FileBlock(number, start, end, end - start) for start, end in itertools.pairwise(marks)]


def read(file: DataFile, block: FileBlock, field: str) -> Iterator[TextPiece | Skipped]:
    """Yield the documents of a block. Raises UserError for unreadable files, OSError when the store fails."""
    match file.format:
        case ".txt":
            yield from lines.read_text(file, block)
        case ".parquet" | ".arrow":
            yield from tables.read_column(file, block, field)
        case _:
            for item in read_records(file, block):
                if isinstance(item, Record) and file.format == ".csv" and field not in item.fields:
                    raise UserError(
                        f"data.source {file.shown}: no column {field!r} (columns: {', '.join(item.fields)}): set "
                        "data.textField"
                    )
                yield _text_of(item, field) if isinstance(item, Record) else item


def read_records(file: DataFile, block: FileBlock) -> Iterator[Record | Skipped]:
    """Yield the records of a block. Raises UserError for unreadable files, OSError when the store fails."""
    match file.format:
        case ".txt":
            raise UserError(
                f"data.source {file.shown}: is running text, which has no records: set data.format to Text, or give "
                ".jsonl, .json, .csv, .parquet or .arrow"
            )
        case ".parquet" | ".arrow":
            return tables.read_rows(file, block)
        case ".csv":
            return lines.read_rows(file)
        case _:
            return lines.read_array(file) if lines.is_array(file) else lines.read_json_lines(file, block)


def _text_of(record: Record, field: str) -> TextPiece | Skipped:
    text = record.fields.get(field)
    if not isinstance(text, str):
        known = ", ".join(list(record.fields)[:_KEYS_SHOWN]) or "none"
        return record.skipped(f"no text under {field!r} (keys: {known}): set data.textField")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as \ud800
        return record.skipped("holds half a surrogate pair, which is no character: correct the line")
    return TextPiece(text)


PYTHON_DOCS = "python-docs"


def open_source(name: str, text_field: str) -> DocumentSource:
    """Return the source that `data.source` names. Raises UserError when there is none of that name."""
    if name == PYTHON_DOCS:
        from trainium_trainer.data.sources.python_docs import PythonDocs  # noqa: PLC0415 - parses Python, few runs need it

        return PythonDocs()
    return Files(find_files(name), text_field)


@dataclass(frozen=True)
class SourceSpec:
    """A source as it is named."""

    name: str
    text_field: str

    @functools.cached_property
    def source(self) -> DocumentSource:
        """The source, whose files are listed once. Raises UserError or StorageError."""
        return open_source(self.name, self.text_field)


class Files(DocumentSource):
    """Files, in the order of their names."""

    def __init__(self, files: tuple[DataFile, ...], text_field: str) -> None:
        self.files, self.text_field = files, text_field
        self.size = sum(file.size for file in files)
        self.divisible = all(file.compression is None for file in files)  # compressed text is one stretch
        self.has_lines = any(file.format == ".txt" for file in files)

    def identity(self, memo: Path | None) -> str:
        """Digest of names, contents and the column."""
        total = hashlib.sha256(self.text_field.encode())
        for file in self.files:
            total.update(f"{file.relative}\0{file.digest(memo)}\n".encode())
        return total.hexdigest()

    def blocks(self, target: int) -> list[FileBlock]:
        """All files, one after the other."""
        return [block for number, file in enumerate(self.files) for block in divide(file, number, target)]

    def read(self, block: FileBlock) -> Iterator[TextPiece | Skipped]:
        """One stretch of one file."""
        return read(self.files[block.file], block, self.text_field)

    def records(self, block: FileBlock) -> Iterator[Record | Skipped]:
        """One stretch of one file."""
        return read_records(self.files[block.file], block)

    def named(self, block: FileBlock) -> str:
        """Return the file."""
        return self.files[block.file].shown
