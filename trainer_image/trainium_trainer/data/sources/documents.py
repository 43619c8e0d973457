"""Types of sources: an ordered stream of documents or records, in blocks that can be read alone.

Guarantees:
- Order and blocks depend on names, sizes and contents only, so every rank of every size reads the same stream.
- What is unusable in a source is either refused in a sentence that names file, line or column, or handed on as
  `Skipped`, so that somebody counts it.
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
    """A stretch of text; the last piece of a document is marked, and so is one that another block begins."""

    text: str
    ends_document: bool = True
    document: str | None = None
    """Name of the document, the same for all of its pieces; omitted: its text names it."""
    ids: NDArray[Any] | None = None
    """Token ids in place of text."""
    begins_document: bool = True
    """Whether the first piece of a block is also the first one of its document."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line or row that cannot be used."""

    file: DataFile | str
    """The file, or the name of a data set whose rows have numbers."""
    reason: str
    number: int | None
    """Number of the line or row, from 1; omitted where only its place is known."""
    offset: int = 0
    """Place of the line's beginning, in bytes."""
    unit: str | None = None
    """Unit that is counted; omitted: rows of a table, else lines."""

    def sentence(self) -> str:
        """Return its place and what is wrong; may read the file up to the line."""
        return f"{self.where()}: {self.reason}"

    def where(self) -> str:
        """File and line."""
        if isinstance(self.file, str):
            return f"{self.file} {self.unit or 'row'} {self.number}"
        number = self.number if self.number is not None else self._lines_before(self.file) + 1
        unit = self.unit or ("row" if self.file.format in (".arrow", ".parquet") else "line")
        return f"{self.file.shown} {unit} {number}"

    def _lines_before(self, file: DataFile) -> int:
        count, left = 0, self.offset
        with file.open() as stream:
            while left and (data := stream.read(min(left, _COUNTED_AT_ONCE))):
                count += data.count(b"\n")
                left -= len(data)
        return count


DEFAULT_LIMIT = 100
_DEFAULT_SHARE = 0.01


def refuse_skipped(skipped: int, newest: Skipped | str, limit: int | None, unit: str = "lines") -> None:
    """Raise UserError when more lines were skipped than `data.maxBadLines` allows; `newest` is the last of them."""
    most = DEFAULT_LIMIT if limit is None else limit
    if skipped > most:
        sentence = newest if isinstance(newest, str) else newest.sentence()
        raise UserError(f"data.source {sentence} (more such {unit} than data.maxBadLines {most} lets pass)")


def refuse_skipped_share(
    source: str, skipped: int, records: int, first: str, limit: int | None, *, expected: float = 0.0
) -> None:
    """Raise UserError when more than 1 % of the records were skipped and `data.maxBadLines` does not allow them.

    `expected`: the records of the source, about, of which `records` have been read so far.
    """
    if limit is None and skipped > _DEFAULT_SHARE * max(records, expected):
        raise UserError(
            f"data.source {source}: {skipped:,} of its {records:,} records cannot be used, more than "
            f"{_DEFAULT_SHARE:.0%}, the first: {first} (correct them, or set data.maxBadLines to how many may be "
            "skipped)"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a table or an object of JSON, as a whole."""

    fields: dict[str, Any]
    file: DataFile | str
    number: int | None
    offset: int = 0
    unit: str | None = None
    """The same as in `Skipped`."""

    def skipped(self, reason: str) -> Skipped:
        """Return the same place as one that is skipped."""
        return Skipped(self.file, reason, self.number, self.offset, self.unit)


@dataclass(frozen=True, slots=True)
class FileBlock:
    """A stretch of one file, as its format counts: bytes, row groups, record batches or rows."""

    file: int
    start: int
    end: int
    size: int
    """Bytes, about: how much work it is."""


class DocumentSource(ABC):
    """An ordered stream of documents with an identity; one block of unknown size unless a subclass divides it."""

    name: str
    """Name for sentences."""
    size: int = 0
    """Bytes as stored; 0 when unknown."""
    divisible: bool = False
    """Whether there can be many blocks."""
    has_lines: bool = False
    """Whether it is text of lines, which are no documents."""

    @abstractmethod
    def identity(self, memo: Path | None) -> str:
        """Return a digest that changes with the contents; `memo` is a folder for remembered digests of files."""

    def blocks(self, target: int) -> list[FileBlock]:  # noqa: ARG002 - for sources that can be divided
        """Return the stream in blocks of about `target` bytes. Raises UserError or StorageError."""
        return [FileBlock(0, 0, 0, 0)]

    @abstractmethod
    def read(self, block: FileBlock) -> Iterator[TextPiece | Skipped]:
        """Yield the documents of a block. Raises UserError for unreadable files, OSError when the store fails."""

    @abstractmethod
    def records(self, block: FileBlock) -> Iterator[Record | Skipped]:
        """Yield the records of a block. Raises UserError for unreadable files, OSError when the store fails."""

    def named(self, block: FileBlock) -> str:  # noqa: ARG002 - as above
        """Return the file of a block, for sentences."""
        return self.name

    def all_records(self, block: FileBlock) -> list[Record | Skipped]:
        """Return the records of a block, read again when the store fails for a while."""
        return read_with_retries(self.named(block), lambda: list(self.records(block)))

    def all_documents(self, block: FileBlock) -> list[TextPiece | Skipped]:
        """Return the documents of a block, likewise."""
        return read_with_retries(self.named(block), lambda: list(self.read(block)))
