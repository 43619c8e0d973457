"""Read text, JSON lines, JSON files that hold one array, and comma-separated values with a header.

Guarantees:
- A line belongs to the block in which it begins, and is read once whatever the blocks are.
- An array is read as a whole, since JSON cannot be entered in the middle.
- All comma-separated values are text. A row of another length than the header is skipped and counted.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from trainium_trainer.data.sources.documents import FileBlock, Record, Skipped, TextPiece
from trainium_trainer.data.sources.files import DataFile, read_with_retries
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator


_TEXT_PIECE = 1 << 20
_PROBED = 1 << 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_unpacked(file: DataFile) -> BinaryIO:
    """Return the file's content, unpacked."""
    if file.compression is None:
        return file.open()
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    return cast("BinaryIO", io.BufferedReader(pa.CompressedInputStream(file.open(), file.compression), 1 << 20))


def unpacking_error(file: DataFile, error: OSError) -> UserError | None:
    """Return the sentence when it is a decompressor that complains of bad data."""
    if file.compression is None or error.errno is not None or file.remote:
        return None
    return UserError(f"data.source {file.shown}: cannot be decompressed ({' '.join(str(error).split())}): replace it")


def _lines(file: DataFile, block: FileBlock) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in the block, each with the place where it begins."""
    with open_unpacked(file) as stream:
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
            raise unpacking_error(file, error) or error from error


def _decoded(line: bytes, place: int) -> str:
    """Return the line's text, without a byte-order mark; raises ValueError with a reason."""
    try:
        return line.decode("utf-8-sig" if place == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text at byte {error.start} of it") from error


def read_text(file: DataFile, block: FileBlock) -> Iterator[TextPiece | Skipped]:
    """One document for each file, in pieces that end with a line."""
    parts: list[str] = []
    gathered = end = 0
    begins = block.start == 0
    for number, (place, line) in enumerate(_lines(file, block), start=1):
        end = place + len(line)
        try:
            text = _decoded(line, place)
        except ValueError as error:
            yield Skipped(file, str(error), number if block.start == 0 else None, place)
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


def read_json_lines(file: DataFile, block: FileBlock) -> Iterator[Record | Skipped]:
    """One record for each line."""
    for number, (place, line) in enumerate(_lines(file, block), start=1):
        if line.isspace():
            continue
        known = number if block.start == 0 else None
        try:
            yield _record(json.loads(_decoded(line, place)), file, known, place)
        except json.JSONDecodeError as error:
            yield Skipped(file, f"not JSON ({error.msg}): correct the line", known, place)
        except RecursionError:
            yield Skipped(file, "JSON that is nested too deeply: correct the line", known, place)
        except ValueError as error:
            yield Skipped(file, str(error), known, place)


def _record(value: Any, file: DataFile, number: int | None, place: int = 0, unit: str | None = None) -> Record:
    """Return a record; a value that is no object has no fields, so each form refuses it by the field's name."""
    return Record(value if isinstance(value, dict) else {}, file, number, place, unit)


def is_array(file: DataFile) -> bool:
    """Return whether a .json file holds one array, not a record in each line. Raises UserError or StorageError."""
    if file.format != ".json":
        return False

    def probe() -> bytes:
        with open_unpacked(file) as stream:
            try:
                return stream.read(_PROBED)
            except OSError as error:
                raise unpacking_error(file, error) or error from error

    return read_with_retries(file.shown, probe).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"["


def read_array(file: DataFile) -> Iterator[Record | Skipped]:
    """One record for each item of the array."""
    with open_unpacked(file) as stream:
        try:
            values = json.loads(stream.read().decode("utf-8-sig"))
        except OSError as error:
            raise unpacking_error(file, error) or error from error
        except RecursionError as error:
            raise UserError(f"data.source {file.shown}: JSON that is nested too deeply: correct it") from error
        except json.JSONDecodeError as error:
            raise UserError(
                f"data.source {file.shown} line {error.lineno}: not one JSON array ({error.msg}): correct it, or give "
                "one record in each line"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"data.source {file.shown}: not UTF-8 text at byte {error.start}: convert it") from error
    for number, value in enumerate(values, start=1):
        yield _record(value, file, number, unit="item")


def read_rows(file: DataFile) -> Iterator[Record | Skipped]:
    """One record for each row; quoted values may hold line breaks, so a file is one stretch."""
    csv.field_size_limit(sys.maxsize)
    # What is no UTF-8 is carried as lone surrogates up to the row that it is in.
    with io.TextIOWrapper(open_unpacked(file), "utf-8-sig", errors="surrogateescape", newline="") as stream:
        rows = csv.reader(stream, strict=True)
        try:
            header = next(rows, [])
            doubled = next((name for name in header if header.count(name) > 1), None)
            if doubled is not None:
                raise UserError(f"data.source {file.shown}: two columns are called {doubled!r}: rename one of them")
            for row in rows:
                if row:
                    yield _read(file, header, row, rows.line_num)
        except csv.Error as error:
            raise UserError(
                f"data.source {file.shown} line {rows.line_num}: not comma-separated values ({error}): correct it"
            ) from error
        except OSError as error:
            raise unpacking_error(file, error) or error from error


def _read(file: DataFile, header: list[str], row: list[str], line: int) -> Record | Skipped:
    if len(row) != len(header):
        return Skipped(file, f"has {len(row)} values, the header {len(header)} names: correct the line", line)
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return Skipped(file, "not UTF-8 text: convert the file", line)
    return Record(dict(zip(header, row, strict=True)), file, line)
