"""What `data.source` names: files, a data set of the hub, or Python's own documentation."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_trainer.data.sources.files import S3, SUFFIXES, find_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Record, Skipped, TextPiece
    from trainium_trainer.data.sources.files import DataFile

PYTHON_DOCS = "python-docs"
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?(:[\w.-]+)?$")


def open_source(name: str, text_field: str) -> DocumentSource:
    """The source that `data.source` names. Raises UserError when there is none of that name."""
    if name == PYTHON_DOCS:
        from trainium_trainer.data.sources.python_docs import PythonDocs  # noqa: PLC0415 - parses Python, few runs need it

        return PythonDocs()
    if is_data_set(name):
        from trainium_trainer.data.sources.hub import HubDataset  # noqa: PLC0415 - rare

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

    @property
    def has_lines(self) -> bool:
        """Return whether there is text of lines, which are no documents."""
        return any(file.format == ".txt" for file in self.files)

    def identity(self, memo: Path | None) -> str:
        """Digest of names, contents and the column."""
        total = hashlib.sha256(self.text_field.encode())
        for file in self.files:
            total.update(f"{file.relative}\0{file.digest(memo)}\n".encode())
        return total.hexdigest()

    def blocks(self, target: int) -> list[FileBlock]:
        """All files, one after the other."""
        from trainium_trainer.data.sources.formats.dispatch import divide  # noqa: PLC0415 - loads a format's library when it is read

        return [block for number, file in enumerate(self.files) for block in divide(file, number, target)]

    def read(self, block: FileBlock) -> Iterator[TextPiece | Skipped]:
        """One stretch of one file."""
        from trainium_trainer.data.sources.formats.dispatch import read  # noqa: PLC0415 - loads a format's library when it is read

        return read(self.files[block.file], block, self.text_field)

    def records(self, block: FileBlock) -> Iterator[Record | Skipped]:
        """One stretch of one file."""
        from trainium_trainer.data.sources.formats.dispatch import read_records  # noqa: PLC0415 - loads a format's library when it is read

        return read_records(self.files[block.file], block)

    def named(self, block: FileBlock) -> str:
        """The file."""
        return self.files[block.file].shown
