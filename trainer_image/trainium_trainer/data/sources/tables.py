"""Read Parquet and Arrow files.

Guarantees:
- Arrow files on a mounted file system are mapped, not copied.
- Of Parquet only the columns that are asked for are read.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.sources.documents import FileBlock, Record, Skipped, TextPiece
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_trainer.data.sources.files import DataFile


_ROWS = 1000


def read_column(file: DataFile, block: FileBlock, field: str) -> Iterator[TextPiece | Skipped]:
    """Yield the documents of a block: one in each row of a column of texts or of lists of token ids."""
    with _refusing(file):
        for row, batch, note in _batches(file, block, field):
            for item in _documents(file, batch.column(0), row, field):
                yield Skipped(file, f"{item.reason}{note}", item.number) if isinstance(item, Skipped) else item


def read_rows(file: DataFile, block: FileBlock) -> Iterator[Record | Skipped]:
    """Yield the records of a block: one for each row."""
    with _refusing(file):
        for row, batch, note in _batches(file, block, None):
            for start in range(0, batch.num_rows, _ROWS):
                for item in _records(file, batch.slice(start, _ROWS), row + start):
                    yield Skipped(file, f"{item.reason}{note}", item.number) if isinstance(item, Skipped) else item


def _records(file: DataFile, batch: Any, first: int) -> Iterator[Record | Skipped]:
    try:
        for number, fields in enumerate(batch.to_pylist(maps_as_pydicts="lossy"), start=first):
            yield Record(fields, file, number)
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            try:
                (fields,) = batch.slice(number, 1).to_pylist(maps_as_pydicts="lossy")
                yield Record(fields, file, first + number)
            except UnicodeDecodeError as error:
                yield Skipped(file, f"not UTF-8 text at byte {error.start} of it", first + number)


def _batches(file: DataFile, block: FileBlock, field: str | None) -> Iterator[tuple[int, Any, str]]:
    """Return record batches with the number of their first row, and a note on how it is counted."""
    return _parquet_batches(file, block, field) if file.format == ".parquet" else _arrow_batches(file, block, field)


@contextmanager
def _refusing(file: DataFile) -> Iterator[None]:
    """Turn Arrow's error about a broken file into a sentence."""
    from pyarrow import ArrowException  # noqa: PLC0415 - only tables pay for it

    kind = "a Parquet" if file.format == ".parquet" else "an Arrow"
    try:
        yield
    except ArrowException as error:
        raise _broken(file, kind, error) from error
    except OSError as error:
        if error.errno is None and not file.remote:  # Arrow's own word for data that ends too early
            raise _broken(file, kind, error) from error
        raise


def _checked_column(file: DataFile, schema: Any, field: str) -> None:
    """Refuse a file whose column is not there or holds no text."""
    from pyarrow import types  # noqa: PLC0415 - only tables pay for it

    if field not in schema.names:
        raise UserError(
            f"data.source {file.shown}: no column {field!r} (columns: {', '.join(schema.names)}): set data.textField"
        )
    kind = schema.field(field).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)
    ids = (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(kind.value_type)
    if not text and not ids:
        raise UserError(
            f"data.source {file.shown}: the column {field!r} holds {kind}, neither text nor lists of token ids: "
            "set data.textField"
        )


def _documents(file: DataFile, column: Any, first: int, field: str) -> Iterator[TextPiece | Skipped]:
    """Yield the values of an array, whose first one is row number `first`."""
    from pyarrow import types  # noqa: PLC0415 - only tables pay for it

    missing = f"no text under {field!r}: it is null"
    if types.is_list(column.type) or types.is_large_list(column.type):
        for number, value in enumerate(column, start=first):
            if value.is_valid:
                yield TextPiece("", ids=value.values.to_numpy(zero_copy_only=False))
            else:
                yield Skipped(file, missing, number)
        return
    for start in range(0, len(column), _ROWS):
        part = column.slice(start, _ROWS)
        try:
            values = part.to_pylist()
        except UnicodeDecodeError:
            yield from _one_by_one(file, part, first + start, missing)
            continue
        for number, value in enumerate(values, start=first + start):
            yield TextPiece(value) if value is not None else Skipped(file, missing, number)


def _one_by_one(file: DataFile, column: Any, first: int, missing: str) -> Iterator[TextPiece | Skipped]:
    for number, value in enumerate(column, start=first):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            yield Skipped(file, f"not UTF-8 text at byte {error.start} of it", number)
            continue
        yield TextPiece(text) if text is not None else Skipped(file, missing, number)


def _broken(file: DataFile, kind: str, error: BaseException) -> UserError:
    return UserError(
        f"data.source {file.shown}: not {kind} file, or not all of one ({' '.join(str(error).split())[:300]}): "
        "copy it again"
    )


def _opened_parquet(file: DataFile) -> Any:
    from pyarrow import parquet  # noqa: PLC0415 - only tables pay for it

    with _refusing(file):
        if file.remote:
            return parquet.ParquetFile(file.open_remote(), pre_buffer=True)
        return parquet.ParquetFile(file.path, memory_map=True)


def divide_parquet(file: DataFile, number: int, target: int) -> list[FileBlock]:
    """Row groups in blocks."""
    with _opened_parquet(file) as table:
        metadata = table.metadata
        sizes = [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
    return _grouped(number, sizes, target)


def _grouped(number: int, sizes: list[int], target: int) -> list[FileBlock]:
    """Neighbours put together until they are worth a block."""
    blocks, start, gathered = [], 0, 0
    for index, size in enumerate(sizes):
        gathered += size
        if gathered >= target or index == len(sizes) - 1:
            blocks.append(FileBlock(number, start, index + 1, gathered))
            start, gathered = index + 1, 0
    return blocks


def _parquet_batches(file: DataFile, block: FileBlock, field: str | None) -> Iterator[tuple[int, Any, str]]:
    with _opened_parquet(file) as table:
        if field is not None:
            _checked_column(file, table.schema_arrow, field)
        row = 1 + sum(table.metadata.row_group(index).num_rows for index in range(block.start))
        groups = list(range(block.start, block.end))
        columns = None if field is None else [field]
        for batch in table.iter_batches(_ROWS, row_groups=groups, columns=columns, use_threads=False):
            yield row, batch, ""
            row += batch.num_rows


@functools.lru_cache(maxsize=2)
def _opened_arrow(file: DataFile) -> Any:
    """Return a reader of record batches by number, or the table of a file that has no such numbers."""
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    with _refusing(file):
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
    """Record batches in blocks, or rows where there is only one batch."""
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    content = _opened_arrow(file)
    if isinstance(content, pa.Table):
        rows = content.num_rows
        count = min(max(1, round(file.size / target)), max(1, rows))
        marks = [index * rows // count for index in range(count + 1)]
        return [FileBlock(number, a, b, file.size // count) for a, b in itertools.pairwise(marks)]
    batches = content.num_record_batches
    return _grouped(number, [file.size // max(1, batches)] * batches, target)


def _arrow_batches(file: DataFile, block: FileBlock, field: str | None) -> Iterator[tuple[int, Any, str]]:
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    content = _opened_arrow(file)
    if field is not None:
        _checked_column(file, content.schema, field)
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
