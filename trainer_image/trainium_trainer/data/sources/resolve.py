"""Open the source of `data.source` (files, a data set of the hub, Python's documentation) by its format.

Guarantees:
- The blocks of a file, read in order, equal the whole file: every line and row belongs to exactly one block, a line to
  the block in which it begins.
- A file that can be read in parts is never read as a whole.
- The same code reads documents and records.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_trainer.data.sources import lines, tables
from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Record, SkippedRecord, TextPiece
from trainium_trainer.data.sources.files import DataFile, find_files, read_with_retries
from trainium_trainer.data.sources.hub import HUB, pin_revision
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_KEYS_SHOWN = 8


PYTHON_DOCS = "python-docs"


def open_source(name: str, text_field: str) -> DocumentSource:
    """Open the source of `data.source`. Raises UserError if there is none of that name."""
    if name == PYTHON_DOCS:
        from trainium_trainer.data.sources.python_docs import PythonDocs  # noqa: PLC0415 - parses Python, few runs need it

        return PythonDocs()
    return FileSource(find_files(name), text_field)


def pin_source(name: str) -> str:
    """Return the name of a source, of one on the hub with its present commit. Raises UserError and StorageError."""
    return pin_revision(name) if name.startswith(HUB) else name


@dataclass(frozen=True)
class SourceSpec:
    """A source by name."""

    name: str
    text_field: str

    @functools.cached_property
    def source(self) -> DocumentSource:
        """The opened source; its files are listed once. Raises UserError or StorageError."""
        return open_source(self.name, self.text_field)


class FileSource(DocumentSource):
    """A source of files, in the order of their names."""

    def __init__(self, files: tuple[DataFile, ...], text_field: str) -> None:
        self.files, self.text_field = files, text_field
        self.size = sum(file.size for file in files)
        self.divisible = all(file.compression is None for file in files)  # a compressed file is one block
        self.has_lines = any(file.format == ".txt" for file in files)

    def identity(self, cache_folder: Path | None) -> str:
        """Return a digest of names, contents and the column."""
        total = hashlib.sha256(self.text_field.encode())
        for file in self.files:
            total.update(f"{file.relative}\0{file.digest(cache_folder)}\n".encode())
        return total.hexdigest()

    def blocks(self, target: int) -> list[FileBlock]:
        """Return the blocks of all files, in order."""
        return [block for number, file in enumerate(self.files) for block in _divide(file, number, target)]

    def read(self, block: FileBlock) -> Iterator[TextPiece | SkippedRecord]:
        """Yield the documents of a block."""
        file, field = self.files[block.file], self.text_field
        match file.format:
            case ".txt":
                yield from lines.read_text(file, block)
            case ".parquet" | ".arrow":
                yield from tables.read_column(file, block, field)
            case _:
                for item in self.records(block):
                    if isinstance(item, Record) and file.format == ".csv" and field not in item.fields:
                        raise UserError(
                            f"data.source {file.name}: no column {field!r} (columns: {', '.join(item.fields)}): set "
                            "data.textField"
                        )
                    yield _extract_text(item, field) if isinstance(item, Record) else item

    def records(self, block: FileBlock) -> Iterator[Record | SkippedRecord]:
        """Yield the records of a block."""
        file = self.files[block.file]
        match file.format:
            case ".txt":
                raise UserError(
                    f"data.source {file.name}: is running text, which has no records: set data.format to Text, or "
                    "give .jsonl, .json, .csv, .parquet or .arrow"
                )
            case ".parquet" | ".arrow":
                return tables.read_rows(file, block)
            case ".csv":
                return lines.read_rows(file)
            case _:
                return lines.read_array(file) if lines.is_array(file) else lines.read_json_lines(file, block)

    def file_name_of(self, block: FileBlock) -> str:
        """Return the name of the block's file."""
        return self.files[block.file].name


def _divide(file: DataFile, number: int, target: int) -> list[FileBlock]:
    """Return the blocks of a file, about `target` bytes each. Raises UserError or StorageError."""
    if file.size == 0:
        return []
    match file.format:
        case ".parquet":
            return read_with_retries(file.name, lambda: tables.divide_parquet(file, number, target))
        case ".arrow":
            return read_with_retries(file.name, lambda: tables.divide_arrow(file, number, target))
    if file.compression is not None:
        return [FileBlock(number, 0, file.size, file.size * 4)]
    if file.format == ".csv" or lines.is_array(file):
        return [FileBlock(number, 0, file.size, file.size)]
    count = max(1, round(file.size / target))
    marks = [index * file.size // count for index in range(count + 1)]
    return [FileBlock(number, start, end, end - start) for start, end in itertools.pairwise(marks)]


def _extract_text(record: Record, field: str) -> TextPiece | SkippedRecord:
    text = record.fields.get(field)
    if not isinstance(text, str):
        known = ", ".join(list(record.fields)[:_KEYS_SHOWN]) or "none"
        return record.skipped(f"no text under {field!r} (keys: {known}): set data.textField")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as \ud800
        return record.skipped("holds half a surrogate pair, which is no character: correct the line")
    return TextPiece(text)
