"""Read Hugging Face data sets by name, through their library."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from trainium_trainer.data.sources.documents import FileBlock, Record, Skipped, TextPiece
from trainium_trainer.exits import UnreadableError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class HubDataset:
    """The training split of a data set, `owner/name` or `owner/name:configuration`."""

    name: str
    text_field: str
    size: int = 0
    divisible: bool = False
    has_lines: bool = False

    def identity(self, memo: Path | None) -> str:  # noqa: ARG002 - other sources need it
        """Return the name: asking for a fingerprint would load the data set at every start."""
        return hashlib.sha256(f"hub\0{self.name}\0{self.text_field}".encode()).hexdigest()

    def blocks(self, target: int) -> list[FileBlock]:  # noqa: ARG002 - as above
        """Return one block: the library has its own order."""
        return [FileBlock(0, 0, 0, 0)]

    def named(self, block: FileBlock) -> str:  # noqa: ARG002 - as above
        """Return the data set."""
        return self.name

    def read(self, block: FileBlock) -> Iterator[TextPiece | Skipped]:  # noqa: ARG002 - as above
        """Yield the texts of the training split."""
        rows = self._rows()
        if self.text_field not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise UserError(
                f"data.source {self.name}: no column {self.text_field!r} (columns: {columns}): set data.textField"
            )
        batches = rows.select_columns([self.text_field]).iter(1000)
        values = itertools.chain.from_iterable(batch[self.text_field] for batch in batches)
        for number, value in enumerate(values, start=1):
            if isinstance(value, str):
                yield TextPiece(value)
            else:
                yield Skipped(_Rows(self.name), f"no text under {self.text_field!r}", number, unit="row")

    def records(self, block: FileBlock) -> Iterator[Record]:  # noqa: ARG002 - as above
        """Yield the rows of the training split."""
        place = _Rows(self.name)
        for number, fields in enumerate(self._rows(), start=1):
            yield Record(fields, place, number, unit="row")

    def _rows(self) -> Any:
        import datasets  # noqa: PLC0415 - takes two seconds, only for the first tokenisation

        name, _, configuration = self.name.partition(":")
        try:
            return datasets.load_dataset(name, configuration or None, split="train")
        except Exception as error:
            raise UnreadableError(
                f"data.source {self.name}: neither a local file or folder nor a data set that could be loaded "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): correct the name or use a local file"
            ) from error


@dataclass(frozen=True, slots=True)
class _Rows:
    """Names the rows of a data set."""

    shown: str
    format: str = ""

    def open(self) -> BinaryIO:
        """Nobody counts lines here: rows have numbers."""
        raise AssertionError(self.shown)
