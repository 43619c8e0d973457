"""Read Hugging Face data sets by name, through their library."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Record, Skipped, TextPiece
from trainium_trainer.exits import UnreadableError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class HubDataset(DocumentSource):
    """The training split of a data set, `owner/name` or `owner/name:configuration`; the library has its own order."""

    def __init__(self, name: str, text_field: str) -> None:
        self.name, self.text_field = name, text_field

    def identity(self, memo: Path | None) -> str:  # noqa: ARG002 - other sources need it
        """Return the name: asking for a fingerprint would load the data set at every start."""
        return hashlib.sha256(f"hub\0{self.name}\0{self.text_field}".encode()).hexdigest()

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
                yield Skipped(self.name, f"no text under {self.text_field!r}", number, unit="row")

    def records(self, block: FileBlock) -> Iterator[Record]:  # noqa: ARG002 - as above
        """Yield the rows of the training split."""
        for number, fields in enumerate(self._rows(), start=1):
            yield Record(fields, self.name, number, unit="row")

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
