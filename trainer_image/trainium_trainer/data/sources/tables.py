"""Read Parquet and Arrow files.

Guarantees:
- Arrow files on a mounted file system are memory-mapped, not copied.
- Only the requested columns of Parquet files are read.
"""

from __future__ import annotations

import base64
import functools
import itertools
import math
import numbers
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from trainium_trainer.data.sources.documents import FileBlock, Record, SkippedRecord, TextPiece
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_trainer.data.sources.files import DataFile


_ROWS = 1000


def read_column(file: DataFile, block: FileBlock, field: str) -> Iterator[TextPiece | SkippedRecord]:
    """Yield the documents of a block, one per row of a column of texts or of lists of token ids."""
    with _convert_errors(file):
        for row, batch, note in _read_batches(file, block, field):
            yield from _iterate_documents(file, batch.column(0), row, f"no text under {field!r}: it is null", note)


def read_rows(file: DataFile, block: FileBlock) -> Iterator[Record | SkippedRecord]:
    """Yield the records of a block, one per row."""
    with _convert_errors(file):
        for row, batch, note in _read_batches(file, block, None):
            for number, fields in _iterate_values(batch, row):
                if isinstance(fields, UnicodeDecodeError):
                    yield _skip_invalid_text(file, fields, number, note)
                else:
                    yield Record({name: _to_json(value) for name, value in fields.items()}, file, number)


def _to_json(value: Any) -> Any:
    """Return a value of a table as JSON has it: numbers that are none are null, times are ISO 8601, lengths seconds."""
    match value:
        case dict():
            return {name: _to_json(item) for name, item in value.items()}
        case list() | tuple():
            return [_to_json(item) for item in value]
        case numbers.Real() if not isinstance(value, int):
            return float(value) if math.isfinite(value) else None
        case Decimal():
            return _shorten(float(value)) if _is_exact(value) else str(value)
        case timedelta():
            return _shorten(value.total_seconds())
        case datetime() | time():
            return value.isoformat().removesuffix("+00:00") + ("Z" if value.utcoffset() == timedelta(0) else "")
        case date():
            return value.isoformat()
        case UUID():
            return str(value)
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode()
    return value


def _is_exact(value: Decimal) -> bool:
    """Return whether a number is the same as a float."""
    return value.is_finite() and Decimal(repr(float(value))) == value


def _shorten(number: float) -> float | int:
    """Return a whole number without a fraction."""
    return int(number) if number.is_integer() else number


def _iterate_values(rows: Any, first: int) -> Iterator[tuple[int, Any]]:
    """Yield the rows of an array or a record batch, from number `first` on; in place of invalid text its error."""
    for start in range(0, len(rows), _ROWS):
        part = rows.slice(start, _ROWS)
        try:
            yield from enumerate(part.to_pylist(maps_as_pydicts="lossy"), start=first + start)
        except UnicodeDecodeError:
            for number in range(len(part)):
                value: Any
                try:
                    (value,) = part.slice(number, 1).to_pylist(maps_as_pydicts="lossy")
                except UnicodeDecodeError as error:
                    value = error
                yield first + start + number, value


def _skip_invalid_text(file: DataFile, error: UnicodeDecodeError, number: int, note: str) -> SkippedRecord:
    return SkippedRecord(file, f"not UTF-8 text at byte {error.start} of it{note}", number)


def _read_batches(file: DataFile, block: FileBlock, field: str | None) -> Iterator[tuple[int, Any, str]]:
    """Yield record batches with the number of their first row and the unit of that number."""
    return (
        _read_parquet_batches(file, block, field)
        if file.format == ".parquet"
        else _read_arrow_batches(file, block, field)
    )


@contextmanager
def _convert_errors(file: DataFile) -> Iterator[None]:
    """Convert Arrow's errors about a damaged file into UserError."""
    from pyarrow import ArrowException  # noqa: PLC0415 - only tables pay for it

    kind = "a Parquet" if file.format == ".parquet" else "an Arrow"
    try:
        yield
    except ArrowException as error:
        raise _create_damaged_error(file, kind, error) from error
    except OSError as error:
        if error.errno is None and not file.remote:  # Arrow's message for truncated data
            raise _create_damaged_error(file, kind, error) from error
        raise


def _check_column(file: DataFile, schema: Any, field: str) -> None:
    """Raise UserError for a file whose column is missing or holds no text."""
    from pyarrow import types  # noqa: PLC0415 - only tables pay for it

    if field not in schema.names:
        raise UserError(
            f"data.source {file.name}: no column {field!r} (columns: {', '.join(schema.names)}): set data.textField"
        )
    kind = schema.field(field).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)
    ids = (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(kind.value_type)
    if not text and not ids:
        raise UserError(
            f"data.source {file.name}: the column {field!r} holds {kind}, neither text nor lists of token ids: "
            "set data.textField"
        )


def _iterate_documents(
    file: DataFile, column: Any, first: int, missing: str, note: str
) -> Iterator[TextPiece | SkippedRecord]:
    """Yield the values of an array whose first row has the number `first`."""
    from pyarrow import types  # noqa: PLC0415 - only tables pay for it

    if types.is_list(column.type) or types.is_large_list(column.type):
        for number, value in enumerate(column, start=first):
            if value.is_valid:
                yield TextPiece("", ids=value.values.to_numpy(zero_copy_only=False))
            else:
                yield SkippedRecord(file, f"{missing}{note}", number)
        return
    for number, text in _iterate_values(column, first):
        if isinstance(text, UnicodeDecodeError):
            yield _skip_invalid_text(file, text, number, note)
        else:
            yield TextPiece(text) if text is not None else SkippedRecord(file, f"{missing}{note}", number)


def _create_damaged_error(file: DataFile, kind: str, error: BaseException) -> UserError:
    return UserError(
        f"data.source {file.name}: not {kind} file, or not all of one ({' '.join(str(error).split())[:300]}): "
        "copy it again"
    )


def _open_parquet(file: DataFile) -> Any:
    from pyarrow import parquet  # noqa: PLC0415 - only tables pay for it

    with _convert_errors(file):
        if file.remote:
            return parquet.ParquetFile(file.open_remote(), pre_buffer=True)
        return parquet.ParquetFile(file.path, memory_map=True)


def divide_parquet(file: DataFile, number: int, target: int) -> list[FileBlock]:
    """Combine row groups into blocks."""
    with _open_parquet(file) as table:
        metadata = table.metadata
        sizes = [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
    return _group_units(number, sizes, target)


def count_parquet_rows(file: DataFile, block: FileBlock) -> int:
    """Count the rows of a block."""
    with _open_parquet(file) as table:
        return sum(table.metadata.row_group(index).num_rows for index in range(block.start, block.end))


def _group_units(number: int, sizes: list[int], target: int) -> list[FileBlock]:
    """Combine neighbouring units until they reach the size of a block."""
    blocks, start, gathered = [], 0, 0
    for index, size in enumerate(sizes):
        gathered += size
        if gathered >= target or index == len(sizes) - 1:
            blocks.append(FileBlock(number, start, index + 1, gathered))
            start, gathered = index + 1, 0
    return blocks


def _read_parquet_batches(file: DataFile, block: FileBlock, field: str | None) -> Iterator[tuple[int, Any, str]]:
    with _open_parquet(file) as table:
        if field is not None:
            _check_column(file, table.schema_arrow, field)
        row = 1 + sum(table.metadata.row_group(index).num_rows for index in range(block.start))
        groups = list(range(block.start, block.end))
        columns = None if field is None else [field]
        for batch in table.iter_batches(_ROWS, row_groups=groups, columns=columns, use_threads=False):
            yield row, batch, ""
            row += batch.num_rows


@functools.lru_cache(maxsize=2)
def _open_arrow(file: DataFile) -> Any:
    """Return a reader of record batches by index, or the table of a file in the streaming format."""
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    with _convert_errors(file):
        stream = file.open_remote() if file.remote else pa.memory_map(file.path)
        try:
            reader: Any = pa.ipc.open_file(stream)
        except pa.ArrowInvalid:  # the streaming format, as `datasets` writes it
            stream.seek(0)
            return pa.ipc.open_stream(stream).read_all()
        if reader.num_record_batches == 1:
            return pa.Table.from_batches([reader.get_batch(0)])
        return reader


def divide_arrow(file: DataFile, number: int, target: int) -> list[FileBlock]:
    """Combine record batches into blocks, or divide the rows of a single batch."""
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    content = _open_arrow(file)
    if isinstance(content, pa.Table):
        rows = content.num_rows
        count = min(max(1, round(file.size / target)), max(1, rows))
        marks = [index * rows // count for index in range(count + 1)]
        return [FileBlock(number, a, b, file.size // count) for a, b in itertools.pairwise(marks)]
    batches = content.num_record_batches
    return _group_units(number, [file.size // max(1, batches)] * batches, target)


def _read_arrow_batches(file: DataFile, block: FileBlock, field: str | None) -> Iterator[tuple[int, Any, str]]:
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    content = _open_arrow(file)
    if field is not None:
        _check_column(file, content.schema, field)
    if isinstance(content, pa.Table):
        table = content if field is None else content.select([field])
        row = block.start + 1
        for batch in table.slice(block.start, block.end - block.start).to_batches():
            yield row, batch, ""
            row += batch.num_rows
        return
    for index in range(block.start, block.end):
        batch = content.get_batch(index)
        yield 1, batch if field is None else batch.select([field]), f" (in record batch {index})"
