"""Comma-separated values with a header, as the `csv` module reads them.

Invariant: all values are text; a row of another length than the header is skipped and counted, never stretched to fit.
"""

from __future__ import annotations

import csv
import io
import sys
from typing import TYPE_CHECKING

from trainium_trainer.data.sources.documents import Record, Skipped
from trainium_trainer.data.sources.formats.lines import opened, unpacking_error
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_trainer.data.sources.files import DataFile


def read_rows(file: DataFile) -> Iterator[Record | Skipped]:
    """One record for each row; quoted values may hold line breaks, so a file is one stretch."""
    csv.field_size_limit(sys.maxsize)
    # What is no UTF-8 is carried as lone surrogates up to the row that it is in.
    with io.TextIOWrapper(opened(file), "utf-8-sig", errors="surrogateescape", newline="") as stream:
        rows = csv.reader(stream, strict=True)
        try:
            header = next(rows, [])
            _check_header(file, header)
            for row in rows:
                if row:
                    yield _read(file, header, row, rows.line_num)
        except csv.Error as error:
            raise UserError(
                f"data.source {file.shown} line {rows.line_num}: not comma-separated values ({error}): correct it"
            ) from error
        except OSError as error:
            raise unpacking_error(file, error) or error from error


def _check_header(file: DataFile, header: list[str]) -> None:
    doubled = next((name for name in header if header.count(name) > 1), None)
    if doubled is not None:
        raise UserError(f"data.source {file.shown}: two columns are called {doubled!r}: rename one of them")


def _read(file: DataFile, header: list[str], row: list[str], line: int) -> Record | Skipped:
    if len(row) != len(header):
        return Skipped(file, f"has {len(row)} values, the header {len(header)} names: correct the line", line)
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return Skipped(file, "not UTF-8 text: convert the file", line)
    return Record(dict(zip(header, row, strict=True)), file, line)
