"""Open a source of `data.source`: files, a data set of the hub, or Python's documentation.

Guarantees:
- The blocks of a file, read in order, equal the whole file: every line and row belongs to exactly one block, a line to
  the block in which it begins.
- The same code reads documents and records.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from trainium_trainer.data.sources import tables, text_files
from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Record, SkippedRecord, TextPiece
from trainium_trainer.data.sources.files import HUB, DataFile, find_files, read_with_retries
from trainium_trainer.data.sources.hub import SplitPart, find_hub_files, format_location, list_parts, pin_revision
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from trainium_contract.trainer.data import DataConfig, HubConfig


_MAX_KEYS = 8


PYTHON_DOCS = "python-docs"


def open_source(name: str, text_field: str) -> DocumentSource:
    """Open the source of `data.source`. Raises UserError if there is none of that name."""
    if name == PYTHON_DOCS:
        from trainium_trainer.data.sources.python_docs import PythonDocs  # noqa: PLC0415 - parses Python, few runs need it

        return PythonDocs()
    if name.startswith(HUB):
        parts = [(part, find_hub_files(location)) for part, location in list_parts(name)]
        files = tuple(file for _, files_of_part in parts for file in files_of_part)
        return FileSource(files, text_field, [(part, len(files_of_part)) for part, files_of_part in parts])
    return FileSource(find_files(name), text_field)


@dataclass(frozen=True)
class SourceSpec:
    """A source by name."""

    name: str
    text_field: str
    weight: float = 1.0
    """The weight in the mixture of sources."""

    def pin(self) -> SourceSpec:
        """Return the source, one on the hub with its present commit. Raises UserError and StorageError."""
        return dataclasses.replace(self, name=pin_revision(self.name)) if self.name.startswith(HUB) else self

    @functools.cached_property
    def source(self) -> DocumentSource:
        """The opened source; its files are listed once. Raises UserError or StorageError."""
        return open_source(self.name, self.text_field)


def list_sources(config: DataConfig) -> list[SourceSpec]:
    """Return the sources of a configuration. Raises UserError if there is none."""
    if not config.sources:
        return [SourceSpec(_format_source_name(config.source, config.hub), config.text_field)]
    return [
        SourceSpec(
            _format_source_name(source.source, source.hub), source.text_field or config.text_field, source.weight
        )
        for source in config.sources
    ]


def _format_source_name(source: str | None, hub: HubConfig | None) -> str:
    if hub is not None:
        return format_location(hub)
    if source is None:
        raise UserError(
            "data names nothing to train on: give data.source (a file, a folder, s3://bucket/prefix, or "
            f"{PYTHON_DOCS} for a first try), data.hub or data.sources"
        )
    return source


def find_validation_source(config: DataConfig) -> str | None:
    """Return the name of the separate validation source; None if validation uses a part of the training data."""
    validation = config.validation
    if validation is None or validation.hub_split is None or config.hub is None:
        return validation.source if validation is not None else None
    return format_location(config.hub, validation.hub_split)


def list_locations(config: DataConfig) -> list[str]:
    """Return the names of all sources, and of the separate source of `data.validation`."""
    validation = find_validation_source(config)
    return [spec.name for spec in list_sources(config)] + ([validation] if validation else [])


class FileSource(DocumentSource):
    """A source of files, in the order of their names or splits."""

    def __init__(
        self, files: tuple[DataFile, ...], text_field: str, parts: Sequence[tuple[SplitPart, int]] = ()
    ) -> None:
        """Create the source; `parts` are those of a split, each with the number of its files."""
        self.files, self.text_field = files, text_field
        self._parts = [(part, count) for part, count in parts if part.is_slice] and list(parts)
        self.size = sum(file.size for file in files)
        self.divisible = all(file.compression is None for file in files)  # a compressed file is one block
        self.has_lines = any(file.format == ".txt" for file in files)

    def compute_identity(self, cache_folder: Path | None) -> str:
        """Return a digest of names, contents and the column."""
        total = hashlib.sha256(self.text_field.encode())
        for file in self.files:
            total.update(f"{file.relative}\0{file.digest(cache_folder)}\n".encode())
        for part, count in self._parts:
            total.update(f"{part.text}\0{count}\n".encode())
        return total.hexdigest()

    def divide_into_blocks(self, target: int) -> list[FileBlock]:
        """Return the blocks of all files, in order."""
        blocks = [block for number, file in enumerate(self.files) for block in _divide(file, number, target)]
        if not self._parts:
            return blocks
        chosen, first = list[FileBlock](), 0
        for part, count in self._parts:
            blocks_of_part = [block for block in blocks if first <= block.file < first + count]
            chosen += self._slice(blocks_of_part, part) if part.is_slice else blocks_of_part
            first += count
        return chosen

    def _slice(self, blocks: list[FileBlock], part: SplitPart) -> list[FileBlock]:
        """Return the rows of a part of a split. Raises UserError, StorageError."""
        counts = [self._count_rows(block) for block in blocks]
        first, end = part.find_rows(sum(counts))
        starts = itertools.accumulate(counts, initial=0)
        return [
            dataclasses.replace(block, skip=max(0, first - start), rows=min(end - start, count) - max(0, first - start))
            for block, count, start in zip(blocks, counts, starts, strict=False)
            if start < end and start + count > first
        ]

    def _count_rows(self, block: FileBlock) -> int:
        file = self.files[block.file]
        if file.format == ".txt":
            raise UserError(
                f"data.source {file.name}: is running text, which has no rows: give the whole split in data.hub.split"
            )
        if file.format == ".parquet":
            return read_with_retries(file.name, lambda: tables.count_parquet_rows(file, block))
        return read_with_retries(file.name, lambda: sum(1 for _ in self.iterate_records(block)))

    def read(self, block: FileBlock) -> Iterator[TextPiece | SkippedRecord]:
        """Yield the documents of a block."""
        return _select_rows(self._read(block), block)

    def _read(self, block: FileBlock) -> Iterator[TextPiece | SkippedRecord]:
        file, field = self.files[block.file], self.text_field
        match file.format:
            case ".txt":
                yield from text_files.read_text(file, block)
            case ".parquet" | ".arrow":
                yield from tables.read_column(file, block, field)
            case _:
                for item in self._parse_records(block):
                    if isinstance(item, Record) and file.format == ".csv" and field not in item.fields:
                        raise UserError(
                            f"data.source {file.name}: no column {field!r} (columns: {', '.join(item.fields)}): set "
                            "data.textField"
                        )
                    yield _extract_text(item, field) if isinstance(item, Record) else item

    def iterate_records(self, block: FileBlock) -> Iterator[Record | SkippedRecord]:
        """Yield the records of a block."""
        return _select_rows(self._parse_records(block), block)

    def _parse_records(self, block: FileBlock) -> Iterator[Record | SkippedRecord]:
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
                return text_files.read_csv_rows(file)
            case _:
                return (
                    text_files.read_json_array(file)
                    if text_files.is_json_array(file)
                    else text_files.read_json_lines(file, block)
                )

    def find_file_name(self, block: FileBlock) -> str:
        """Return the name of the block's file."""
        return self.files[block.file].name


_Item = TypeVar("_Item")


def _select_rows(items: Iterator[_Item], block: FileBlock) -> Iterator[_Item]:
    """Yield the rows of a block that it does not leave out."""
    return itertools.islice(items, block.skip, None if block.rows < 0 else block.skip + block.rows)


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
    if file.format == ".csv" or text_files.is_json_array(file):
        return [FileBlock(number, 0, file.size, file.size)]
    count = max(1, round(file.size / target))
    marks = [index * file.size // count for index in range(count + 1)]
    return [FileBlock(number, start, end, end - start) for start, end in itertools.pairwise(marks)]


def _extract_text(record: Record, field: str) -> TextPiece | SkippedRecord:
    text = record.fields.get(field)
    if not isinstance(text, str):
        keys = ", ".join(list(record.fields)[:_MAX_KEYS]) or "none"
        return record.skip(f"no text under {field!r} (keys: {keys}): set data.textField")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as \ud800
        return record.skip("holds half a surrogate pair, which is no character: correct the line")
    return TextPiece(text)
