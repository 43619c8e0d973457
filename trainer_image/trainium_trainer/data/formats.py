"""File formats: how a file is divided into blocks, and the documents of a block.

Invariants: the blocks of a file, read in order, give what the file gives in one piece: every line and row belongs to
exactly one block (a line to the block that it begins in); nothing is read as a whole that can be read in parts; Arrow
files on a mounted file system are mapped, not copied.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from trainium_trainer.data.documents import Block, Piece, Skipped
from trainium_trainer.data.files import reading, s3
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_trainer.data.files import DataFile

_TEXT_PIECE = 1 << 20
_ROWS = 1000
_KEYS_SHOWN = 8


def divide(file: DataFile, number: int, target: int) -> list[Block]:
    """The blocks of a file, about `target` bytes each. Raises UserError or StorageError."""
    if file.size == 0:
        return []
    if file.format == ".parquet":
        return reading(file.shown, lambda: _divide_parquet(file, number, target))
    if file.format == ".arrow":
        return reading(file.shown, lambda: _divide_arrow(file, number, target))
    if file.compression is not None:
        return [Block(number, 0, file.size, file.size * 4)]
    count = max(1, round(file.size / target))
    marks = [index * file.size // count for index in range(count + 1)]
    return [Block(number, start, end, end - start) for start, end in itertools.pairwise(marks)]


def read(file: DataFile, block: Block, field: str) -> Iterator[Piece | Skipped]:
    """The documents of a block. Raises UserError for what can never be read, OSError when the store fails."""
    match file.format:
        case ".txt":
            return _read_text(file, block)
        case ".parquet":
            return _read_parquet(file, block, field)
        case ".arrow":
            return _read_arrow(file, block, field)
        case _:
            return _read_json_lines(file, block, field)


# ---- text and JSON lines --------------------------------------------------------------------------------------------


def _open(file: DataFile) -> BinaryIO:
    if file.compression is None:
        return file.open()
    import pyarrow as pa  # noqa: PLC0415 - only compressed data pays for it

    return cast("BinaryIO", io.BufferedReader(pa.CompressedInputStream(file.open(), file.compression), 1 << 20))


def _lines(file: DataFile, block: Block) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the block, each with the place where it begins."""
    with _open(file) as stream:
        place = block.start
        if place:
            # The line that this byte is in began earlier, unless the byte before it ends one.
            stream.seek(place - 1)
            place += len(stream.readline()) - 1
        whole = file.compression is not None
        try:
            while (whole or place < block.end) and (line := stream.readline()):
                yield place, line
                place += len(line)
        except OSError as error:
            if whole and error.errno is None and not file.remote:  # what a decompressor says of bad data
                raise UserError(
                    f"data.source {file.shown}: cannot be decompressed ({' '.join(str(error).split())}): replace it"
                ) from error
            raise


def _decoded(line: bytes, place: int) -> str:
    """The line's text, without a byte-order mark; raises ValueError with a reason."""
    try:
        return line.decode("utf-8-sig" if place == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text at byte {error.start} of it") from error


def _skipped(file: DataFile, block: Block, place: int, number: int, reason: str) -> Skipped:
    return Skipped(file, reason, number if block.start == 0 else None, place)


def _read_text(file: DataFile, block: Block) -> Iterator[Piece | Skipped]:
    """One document for each file, in pieces that end with a line."""
    parts: list[str] = []
    gathered = end = 0
    for number, (place, line) in enumerate(_lines(file, block), start=1):
        end = place + len(line)
        try:
            text = _decoded(line, place)
        except ValueError as error:
            yield _skipped(file, block, place, number, str(error))
            continue
        if gathered >= _TEXT_PIECE:
            yield Piece("".join(parts), ends_document=False, document=file.relative)
            parts, gathered = [], 0
        parts.append(text.replace("\r\n", "\n").replace("\r", "\n"))
        gathered += len(text)
    if parts:
        # The block that reads the last line ends the document; it may not be the last block.
        ends = file.compression is not None or end >= file.size
        yield Piece("".join(parts), ends_document=ends, document=file.relative)


def _read_json_lines(file: DataFile, block: Block, field: str) -> Iterator[Piece | Skipped]:
    for number, (place, line) in enumerate(_lines(file, block), start=1):
        if line.isspace():
            continue
        try:
            yield Piece(_json_text(_decoded(line, place), field))
        except ValueError as error:
            yield _skipped(file, block, place, number, str(error))


def _json_text(line: str, field: str) -> str:
    """The text of a record; raises ValueError with a reason."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}): correct the line") from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply: correct the line") from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        known = ", ".join(list(record)[:_KEYS_SHOWN]) if isinstance(record, dict) else "none"
        raise ValueError(f"no text under {field!r} (keys: {known}): set data.textField")  # noqa: TRY004 - see above
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, as \ud800
        raise ValueError("holds half a surrogate pair, which is no character: correct the line") from error
    return text


# ---- tables ---------------------------------------------------------------------------------------------------------


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


def _documents(file: DataFile, column: Any, first: int) -> Iterator[Piece | Skipped]:
    """The values of an array, whose first one is row number `first`; nulls are nothing."""
    from pyarrow import types  # noqa: PLC0415 - as above

    if types.is_list(column.type) or types.is_large_list(column.type):
        for value in column:
            if value.is_valid:
                yield Piece("", ids=value.values.to_numpy(zero_copy_only=False))
        return
    for start in range(0, len(column), _ROWS):
        part = column.slice(start, _ROWS)
        try:
            values = part.to_pylist()
        except UnicodeDecodeError:
            yield from _one_by_one(file, part, first + start)
            continue
        for value in values:
            if value is not None:
                yield Piece(value)


def _one_by_one(file: DataFile, column: Any, first: int) -> Iterator[Piece | Skipped]:
    for number, value in enumerate(column, start=first):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            yield Skipped(file, f"not UTF-8 text at byte {error.start} of it", number)
            continue
        if text is not None:
            yield Piece(text)


def _broken(file: DataFile, kind: str, error: BaseException) -> UserError:
    return UserError(
        f"data.source {file.shown}: not {kind} file, or not all of one ({' '.join(str(error).split())[:300]}): "
        "copy it again"
    )


def _opened_parquet(file: DataFile) -> Any:
    from pyarrow import ArrowException, parquet  # noqa: PLC0415 - as above

    try:
        if file.remote:
            return parquet.ParquetFile(s3().open_input_file(file.path), pre_buffer=True)
        return parquet.ParquetFile(file.path, memory_map=True)
    except ArrowException as error:
        raise _broken(file, "a Parquet", error) from error


def _divide_parquet(file: DataFile, number: int, target: int) -> list[Block]:
    with _opened_parquet(file) as table:
        metadata = table.metadata
        sizes = [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
    return _grouped(number, sizes, target)


def _grouped(number: int, sizes: list[int], target: int) -> list[Block]:
    """Neighbours put together until they are worth a block."""
    blocks, start, gathered = [], 0, 0
    for index, size in enumerate(sizes):
        gathered += size
        if gathered >= target or index == len(sizes) - 1:
            blocks.append(Block(number, start, index + 1, gathered))
            start, gathered = index + 1, 0
    return blocks


def _read_parquet(file: DataFile, block: Block, field: str) -> Iterator[Piece | Skipped]:
    from pyarrow import ArrowException  # noqa: PLC0415 - as above

    try:
        with _opened_parquet(file) as table:
            _checked_column(file, table.schema_arrow, field)
            row = 1 + sum(table.metadata.row_group(index).num_rows for index in range(block.start))
            groups = list(range(block.start, block.end))
            for batch in table.iter_batches(_ROWS, row_groups=groups, columns=[field], use_threads=False):
                yield from _documents(file, batch.column(0), row)
                row += batch.num_rows
    except ArrowException as error:
        raise _broken(file, "a Parquet", error) from error
    except OSError as error:
        if error.errno is None and not file.remote:  # Arrow's own word for data that ends too early
            raise _broken(file, "a Parquet", error) from error
        raise


@functools.lru_cache(maxsize=2)
def _opened_arrow(file: DataFile) -> Any:
    """A reader of record batches by number, or the table of a file that has no such numbers."""
    import pyarrow as pa  # noqa: PLC0415 - as above

    try:
        stream = s3().open_input_file(file.path) if file.remote else pa.memory_map(file.path)
        try:
            reader: Any = pa.ipc.open_file(stream)
        except pa.ArrowInvalid:  # the streaming format, as `datasets` writes it
            stream.seek(0)
            return pa.ipc.open_stream(stream).read_all()
        if reader.num_record_batches == 1:
            return pa.Table.from_batches([reader.get_batch(0)])
    except pa.ArrowException as error:
        raise _broken(file, "an Arrow", error) from error
    except OSError as error:
        if error.errno is None and not file.remote:
            raise _broken(file, "an Arrow", error) from error
        raise
    return reader


def _divide_arrow(file: DataFile, number: int, target: int) -> list[Block]:
    import pyarrow as pa  # noqa: PLC0415 - as above

    content = _opened_arrow(file)
    if isinstance(content, pa.Table):
        rows = content.num_rows
        count = min(max(1, round(file.size / target)), max(1, rows))
        marks = [index * rows // count for index in range(count + 1)]
        return [Block(number, a, b, file.size // count) for a, b in itertools.pairwise(marks)]
    batches = content.num_record_batches
    return _grouped(number, [file.size // max(1, batches)] * batches, target)


def _read_arrow(file: DataFile, block: Block, field: str) -> Iterator[Piece | Skipped]:
    import pyarrow as pa  # noqa: PLC0415 - as above

    content = _opened_arrow(file)
    _checked_column(file, content.schema, field)
    try:
        if isinstance(content, pa.Table):
            row = block.start + 1
            for chunk in content.column(field).slice(block.start, block.end - block.start).chunks:
                yield from _documents(file, chunk, row)
                row += len(chunk)
            return
        for index in range(block.start, block.end):
            for item in _documents(file, content.get_batch(index).column(field), 1):
                if isinstance(item, Skipped):
                    yield replace(item, reason=f"{item.reason} (in record batch {index})")
                else:
                    yield item
    except pa.ArrowException as error:
        raise _broken(file, "an Arrow", error) from error
