"""Types of sources: an ordered stream of documents or records, in blocks that can be read independently.

Guarantees:
- Order and blocks depend only on names, sizes and contents, so all ranks read the same stream at every size.
- Unusable content is either refused with an error that names file, line or column, or yielded as `SkippedRecord`, so
  that it is counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.sources.files import DataFile, read_with_retries
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


_COUNTED_AT_ONCE = 16 << 20


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of text; the last piece of a document is marked, and so is one of a document from an earlier block."""

    text: str
    ends_document: bool = True
    document: str | None = None
    """The name of the document, the same for all of its pieces; omitted: its text names it."""
    ids: NDArray[Any] | None = None
    """Token ids instead of text."""
    begins_document: bool = True
    """Whether the first piece of a block is also the first piece of its document."""


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """An unusable line or row."""

    file: DataFile | str
    """The file, or the name of a data set with numbered rows."""
    reason: str
    number: int | None
    """The number of the line or row, from 1; omitted if only the offset is known."""
    offset: int = 0
    """The offset of the line in bytes."""
    unit: str | None = None
    """The unit of the number; omitted: rows of a table, else lines."""

    def format_message(self) -> str:
        """Return the location and the problem; may read the file up to the line."""
        return f"{self.format_location()}: {self.reason}"

    def format_location(self) -> str:
        """Return the file and line."""
        if isinstance(self.file, str):
            return f"{self.file} {self.unit or 'row'} {self.number}"
        number = self.number if self.number is not None else self._count_lines_before(self.file) + 1
        unit = self.unit or ("row" if self.file.format in (".arrow", ".parquet") else "line")
        return f"{self.file.name} {unit} {number}"

    def _count_lines_before(self, file: DataFile) -> int:
        count, remaining = 0, self.offset
        with file.open() as stream:
            while remaining and (data := stream.read(min(remaining, _COUNTED_AT_ONCE))):
                count += data.count(b"\n")
                remaining -= len(data)
        return count


DEFAULT_LIMIT = 100
_DEFAULT_SHARE = 0.01


def refuse_skipped(skipped: int, newest: SkippedRecord | str, limit: int | None, unit: str = "lines") -> None:
    """Raise UserError if more lines were skipped than `data.maxBadLines` allows; `newest` is the last of them."""
    max_skipped = DEFAULT_LIMIT if limit is None else limit
    if skipped > max_skipped:
        message = newest if isinstance(newest, str) else newest.format_message()
        raise UserError(f"data.source {message} (more such {unit} than data.maxBadLines {max_skipped} lets pass)")


def refuse_skipped_share(
    source: str, skipped: int, records: int, first: str, limit: int | None, *, expected: float = 0.0
) -> None:
    """Raise UserError if more than 1 % of the records were skipped and `data.maxBadLines` does not allow them.

    `expected` is the approximate number of records of the source, of which `records` have been read so far.
    """
    if limit is None and skipped > _DEFAULT_SHARE * max(records, expected):
        raise UserError(
            f"data.source {source}: {skipped:,} of its {records:,} records cannot be used, more than "
            f"{_DEFAULT_SHARE:.0%}, the first: {first} (correct them, or set data.maxBadLines to how many may be "
            "skipped)"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """A whole row of a table or JSON object."""

    fields: dict[str, Any]
    file: DataFile | str
    number: int | None
    offset: int = 0
    unit: str | None = None
    """The same as in `SkippedRecord`."""

    def skip(self, reason: str) -> SkippedRecord:
        """Return the record as skipped."""
        return SkippedRecord(self.file, reason, self.number, self.offset, self.unit)


@dataclass(frozen=True, slots=True)
class FileBlock:
    """A range of one file in the unit of its format: bytes, row groups, record batches or rows."""

    file: int
    start: int
    end: int
    size: int
    """The approximate size in bytes."""
    skip: int = 0
    """The number of its first rows that are left out."""
    rows: int = -1
    """The number of rows after them; negative: all."""


class DocumentSource(ABC):
    """An ordered stream of documents with an identity; a single block of unknown size unless a subclass divides it."""

    name: str
    """The name, for messages."""
    size: int = 0
    """The stored size in bytes; 0 if unknown."""
    divisible: bool = False
    """Whether the source can be divided into several blocks."""
    has_lines: bool = False
    """Whether the source is text whose lines are not documents."""

    @abstractmethod
    def compute_identity(self, cache_folder: Path | None) -> str:
        """Return a digest that changes with the contents; `cache_folder` is a folder for cached digests of files."""

    def divide_into_blocks(self, target: int) -> list[FileBlock]:  # noqa: ARG002 - for sources that can be divided
        """Return the stream in blocks of about `target` bytes. Raises UserError or StorageError."""
        return [FileBlock(0, 0, 0, 0)]

    @abstractmethod
    def read(self, block: FileBlock) -> Iterator[TextPiece | SkippedRecord]:
        """Yield the documents of a block. Raises UserError for unreadable files, OSError when the store fails."""

    @abstractmethod
    def iterate_records(self, block: FileBlock) -> Iterator[Record | SkippedRecord]:
        """Yield the records of a block. Raises UserError for unreadable files, OSError when the store fails."""

    def find_file_name(self, block: FileBlock) -> str:  # noqa: ARG002 - as above
        """Return the name of a block's file, for messages."""
        return self.name

    def read_records(self, block: FileBlock) -> list[Record | SkippedRecord]:
        """Return the records of a block, with retries while the store fails."""
        return read_with_retries(self.find_file_name(block), lambda: list(self.iterate_records(block)))

    def read_documents(self, block: FileBlock) -> list[TextPiece | SkippedRecord]:
        """Return the documents of a block, with retries while the store fails."""
        return read_with_retries(self.find_file_name(block), lambda: list(self.read(block)))
