"""Sources: ordered streams of documents, in blocks that can be read alone.

Invariants: order and blocks depend on names, sizes and contents only, so every rank of every size reads the same
stream; what is unusable in a source is either refused in a sentence that names file, line or column, or handed on as
`Skipped`, so that somebody counts it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainium_trainer.data.files import S3, SUFFIXES, DataFile, find_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

PYTHON_DOCS = "python-docs"
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?(:[\w.-]+)?$")
_COUNTED_AT_ONCE = 16 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text; the last piece of a document says so."""

    text: str
    ends_document: bool = True
    document: str | None = None
    """What names the document; omitted: its text does. Pieces of one document have the same name."""
    ids: NDArray[Any] | None = None
    """Token ids in place of text."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line or row that cannot be used."""

    file: DataFile
    reason: str
    number: int | None
    """Number of the line or row, from 1; omitted where only its place is known."""
    offset: int = 0
    """Place of the line's beginning, in bytes."""

    def sentence(self) -> str:
        """Where it is and what is wrong; may read the file up to the line."""
        number = self.number if self.number is not None else self._lines_before() + 1
        unit = "row" if self.file.format in (".arrow", ".parquet") else "line"
        return f"{self.file.shown} {unit} {number}: {self.reason}"

    def _lines_before(self) -> int:
        count, left = 0, self.offset
        with self.file.open() as stream:
            while left and (data := stream.read(min(left, _COUNTED_AT_ONCE))):
                count += data.count(b"\n")
                left -= len(data)
        return count


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of one file, as its format counts: bytes, row groups, record batches or rows."""

    file: int
    start: int
    end: int
    size: int
    """Bytes, about: how much work it is."""


class Source(Protocol):
    """An ordered stream of documents with an identity."""

    @property
    def size(self) -> int:
        """Bytes as stored; 0 when unknown."""
        ...

    @property
    def divisible(self) -> bool:
        """Whether there can be many blocks."""
        ...

    def identity(self, memo: Path | None) -> str:
        """A digest that changes with the contents; `memo` is a folder for remembered digests of files."""
        ...

    def blocks(self, target: int) -> list[Block]:
        """The stream in blocks of about `target` bytes. Raises UserError or StorageError."""
        ...

    def read(self, block: Block) -> Iterator[Piece | Skipped]:
        """The documents of a block. Raises UserError for what cannot be read, OSError when the store fails."""
        ...

    def named(self, block: Block) -> str:
        """The file of a block, for sentences."""
        ...


def open_source(name: str, text_field: str) -> Source:
    """The source that `data.source` names. Raises UserError when there is none of that name."""
    if name == PYTHON_DOCS:
        from trainium_trainer.data.python_docs import PythonDocs  # noqa: PLC0415 - parses Python, few runs need it

        return PythonDocs()
    if is_data_set(name):
        from trainium_trainer.data.hub import HubDataset  # noqa: PLC0415 - rare

        return HubDataset(name, text_field)
    return Files(find_files(name), text_field)


def is_data_set(name: str) -> bool:
    """Whether a name can only be that of a Hugging Face data set."""
    from pathlib import Path  # noqa: PLC0415 - for annotations elsewhere

    if name == PYTHON_DOCS or name.startswith((".", "/", "~", S3)) or name.endswith(SUFFIXES):
        return False
    return bool(_HUB_NAME.match(name)) and not Path(name).exists()


@dataclass(frozen=True, slots=True)
class Files:
    """Files, in the order of their names."""

    files: tuple[DataFile, ...]
    text_field: str

    @property
    def size(self) -> int:
        """Sum of the files' sizes."""
        return sum(file.size for file in self.files)

    @property
    def divisible(self) -> bool:
        """Compressed text is one stretch from beginning to end."""
        return all(file.compression is None for file in self.files)

    def identity(self, memo: Path | None) -> str:
        """Digest of names, contents and the column."""
        total = hashlib.sha256(self.text_field.encode())
        for file in self.files:
            total.update(f"{file.relative}\0{file.digest(memo)}\n".encode())
        return total.hexdigest()

    def blocks(self, target: int) -> list[Block]:
        """All files, one after the other."""
        from trainium_trainer.data.formats import divide  # noqa: PLC0415 - needs this module

        return [block for number, file in enumerate(self.files) for block in divide(file, number, target)]

    def read(self, block: Block) -> Iterator[Piece | Skipped]:
        """One stretch of one file."""
        from trainium_trainer.data.formats import read  # noqa: PLC0415 - needs this module

        return read(self.files[block.file], block, self.text_field)

    def named(self, block: Block) -> str:
        """The file."""
        return self.files[block.file].shown
