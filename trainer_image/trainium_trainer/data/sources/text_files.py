"""Read files of running text, JSON lines, JSON arrays and comma-separated values.

Guarantees:
- A line belongs to the block in which it begins.
- A file that can be read in parts is never read as a whole. An array is read as a whole, because JSON cannot be parsed
  from the middle.
- All comma-separated values are text. A row of another length than the header is skipped and counted.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from trainium_trainer.data.sources.documents import FileBlock, Record, SkippedRecord, TextPiece
from trainium_trainer.data.sources.files import read_with_retries
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_trainer.data.sources.files import DataFile

_TEXT_PIECE = 1 << 20
_PROBED = 1 << 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _open_unpacked(file: DataFile) -> BinaryIO:
    """Open the file's decompressed content."""
    if file.compression is None:
        return file.open()
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    return cast("BinaryIO", io.BufferedReader(pa.CompressedInputStream(file.open(), file.compression), 1 << 20))


def _create_unpacking_error(file: DataFile, error: OSError) -> UserError | None:
    """Return the error for corrupt compressed data; None for other errors."""
    if file.compression is None or error.errno is not None or file.remote:
        return None
    return UserError(f"data.source {file.name}: cannot be decompressed ({' '.join(str(error).split())}): replace it")


def _iterate_lines(file: DataFile, block: FileBlock) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in the block, each with its offset."""
    with _open_unpacked(file) as stream:
        offset = block.start
        if offset:
            # The line at this offset began earlier, unless the byte before it ends a line.
            stream.seek(offset - 1)
            offset += len(stream.readline()) - 1
        is_compressed = file.compression is not None
        try:
            while (is_compressed or offset < block.end) and (line := stream.readline()):
                yield offset, line
                offset += len(line)
        except OSError as error:
            raise _create_unpacking_error(file, error) or error from error


def _decode(line: bytes, offset: int) -> str:
    """Decode a line, without a byte-order mark. Raises ValueError with a reason."""
    try:
        return line.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text at byte {error.start} of it") from error


def read_text(file: DataFile, block: FileBlock) -> Iterator[TextPiece | SkippedRecord]:
    """Yield one document per file, in pieces that end with a line."""
    parts: list[str] = []
    gathered = end = 0
    begins = block.start == 0
    for number, (offset, line) in enumerate(_iterate_lines(file, block), start=1):
        end = offset + len(line)
        try:
            text = _decode(line, offset)
        except ValueError as error:
            yield SkippedRecord(file, str(error), number if block.start == 0 else None, offset)
            continue
        if gathered >= _TEXT_PIECE:
            yield TextPiece("".join(parts), ends_document=False, document=file.relative, begins_document=begins)
            parts, gathered = [], 0
        parts.append(text.replace("\r\n", "\n").replace("\r", "\n"))
        gathered += len(text)
    if parts:
        # The block that reads the last line ends the document; it may not be the last block.
        ends = file.compression is not None or end >= file.size
        yield TextPiece("".join(parts), ends_document=ends, document=file.relative, begins_document=begins)


def read_json_lines(file: DataFile, block: FileBlock) -> Iterator[Record | SkippedRecord]:
    """Yield one record per line."""
    for number, (offset, line) in enumerate(_iterate_lines(file, block), start=1):
        if line.isspace():
            continue
        record_number = number if block.start == 0 else None
        try:
            yield _record(json.loads(_decode(line, offset)), file, record_number, offset)
        except json.JSONDecodeError as error:
            yield SkippedRecord(file, f"not JSON ({error.msg}): correct the line", record_number, offset)
        except RecursionError:
            yield SkippedRecord(file, "JSON that is nested too deeply: correct the line", record_number, offset)
        except ValueError as error:
            yield SkippedRecord(file, str(error), record_number, offset)


def _record(value: Any, file: DataFile, number: int | None, offset: int = 0, unit: str | None = None) -> Record:
    """Return a value as a record; a value other than an object has no fields, so the format reports a missing field."""
    return Record(value if isinstance(value, dict) else {}, file, number, offset, unit)


def is_json_array(file: DataFile) -> bool:
    """Return whether a .json file holds one array instead of a record per line. Raises UserError or StorageError."""
    if file.format != ".json":
        return False

    def probe() -> bytes:
        with _open_unpacked(file) as stream:
            try:
                return stream.read(_PROBED)
            except OSError as error:
                raise _create_unpacking_error(file, error) or error from error

    return read_with_retries(file.name, probe).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"["


def read_json_array(file: DataFile) -> Iterator[Record | SkippedRecord]:
    """Yield one record per item of the array."""
    with _open_unpacked(file) as stream:
        try:
            values = json.loads(stream.read().decode("utf-8-sig"))
        except OSError as error:
            raise _create_unpacking_error(file, error) or error from error
        except RecursionError as error:
            raise UserError(f"data.source {file.name}: JSON that is nested too deeply: correct it") from error
        except json.JSONDecodeError as error:
            raise UserError(
                f"data.source {file.name} line {error.lineno}: not one JSON array ({error.msg}): correct it, or give "
                "one record in each line"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"data.source {file.name}: not UTF-8 text at byte {error.start}: convert it") from error
    for number, value in enumerate(values, start=1):
        yield _record(value, file, number, unit="item")


def read_csv_rows(file: DataFile) -> Iterator[Record | SkippedRecord]:
    """Yield one record per row; quoted values may contain line breaks, so a file is one block."""
    csv.field_size_limit(sys.maxsize)
    # Invalid UTF-8 is decoded to lone surrogates, so that the error can name its row.
    with io.TextIOWrapper(_open_unpacked(file), "utf-8-sig", errors="surrogateescape", newline="") as stream:
        rows = csv.reader(stream, strict=True)
        try:
            header = next(rows, [])
            doubled = next((name for name in header if header.count(name) > 1), None)
            if doubled is not None:
                raise UserError(f"data.source {file.name}: two columns are called {doubled!r}: rename one of them")
            for row in rows:
                if row:
                    yield _parse_row(file, header, row, rows.line_num)
        except csv.Error as error:
            raise UserError(
                f"data.source {file.name} line {rows.line_num}: not comma-separated values ({error}): correct it"
            ) from error
        except OSError as error:
            raise _create_unpacking_error(file, error) or error from error


def _parse_row(file: DataFile, header: list[str], row: list[str], line: int) -> Record | SkippedRecord:
    if len(row) != len(header):
        return SkippedRecord(file, f"has {len(row)} values, the header {len(header)} names: correct the line", line)
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return SkippedRecord(file, "not UTF-8 text: convert the file", line)
    return Record(dict(zip(header, row, strict=True)), file, line)
