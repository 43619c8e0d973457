"""Ordered streams of text: local .txt, .jsonl, Arrow and Parquet files, folders of them, and Hugging Face data sets.

Invariants: the order of pieces depends on names and contents only, so every rank of every size reads the same stream;
files are read piece by piece, never as a whole; what cannot be used is refused in a sentence that names file, line or
column.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIXES = (".txt", ".jsonl", ".arrow", ".parquet")
PYTHON_DOCS = "python-docs"
_BLOCK = 1 << 20
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?(:[\w.-]+)?$")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text; the last piece of a document says so."""

    text: str
    ends_document: bool = True


class Source(Protocol):
    """An ordered stream of text with an identity."""

    def identity(self, memo: Path) -> str:
        """A digest that changes with the contents; `memo` is a folder for remembered digests of files."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """The text from its beginning. Raises UserError for what cannot be read."""
        ...


def open_source(name: str, text_field: str) -> Source:
    """The source that `data.source` names. Raises UserError when there is none of that name."""
    if name == PYTHON_DOCS:
        from trainium_trainer.data.python_docs import PythonDocs  # noqa: PLC0415 - parses Python, few runs need it

        return PythonDocs()
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise UserError(f"data.source {name}: the folder holds no {', '.join(SUFFIXES)} file: put text into it")
        return Files(tuple(files), text_field, root=path)
    if path.exists():
        if path.suffix not in SUFFIXES:
            raise UserError(f"data.source {name}: files end in {', '.join(SUFFIXES)}: convert or rename it")
        return Files((path,), text_field, root=path.parent)
    if path.suffix in SUFFIXES or name.startswith((".", "/", "~")) or not _HUB_NAME.match(name):
        raise UserError(f"data.source {name}: there is no such file or folder: correct the path or mount the data")
    return HubDataset(name, text_field)


@dataclass(frozen=True, slots=True)
class Files:
    """Local files, in the order of their paths."""

    files: tuple[Path, ...]
    text_field: str
    root: Path

    def identity(self, memo: Path) -> str:
        """Digest of names, contents and the column."""
        total = hashlib.sha256(self.text_field.encode())
        for file in self.files:
            total.update(f"{file.relative_to(self.root).as_posix()}\0{_file_digest(file, memo)}\n".encode())
        return total.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """All files, one after the other."""
        for file in self.files:
            try:
                yield from _READERS[file.suffix](file, self.text_field)
            except UnicodeDecodeError as error:
                raise UserError(f"data.source {file}: not UTF-8 text at byte {error.start}: convert it") from error
            except OSError as error:
                reason = error.strerror or " ".join(str(error).split())
                raise UserError(
                    f"data.source {file}: cannot be read ({reason}): correct or replace the file"
                ) from error


def _file_digest(file: Path, memo: Path) -> str:
    """sha256 of a file, remembered by path, size and time, since a large file takes minutes to read."""
    try:
        stat = file.stat()
    except OSError as error:
        raise UserError(f"data.source {file}: cannot be read ({error.strerror}): check the mount") from error
    key = f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    note = memo / f"digest-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    if note.exists():
        return note.read_text(encoding="ascii")
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"data.source {file}: cannot be read ({error.strerror}): check its permissions") from error
    temporary = note.with_suffix(f".{hashlib.sha256(repr(stat).encode()).hexdigest()[:8]}")
    temporary.write_text(digest, encoding="ascii")
    temporary.replace(note)
    return digest


def _read_text(file: Path, _: str) -> Iterator[Piece]:
    """One document, in blocks that end with a line."""
    with file.open(encoding="utf-8") as stream:
        while block := stream.read(_BLOCK):
            block += stream.readline()
            yield Piece(block, ends_document=False)
    yield Piece("")


def _read_jsonl(file: Path, field: str) -> Iterator[Piece]:
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"data.source {file} line {number}: not JSON ({error.msg}): correct the line"
                ) from error
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                known = ", ".join(record) if isinstance(record, dict) else "none"
                raise UserError(
                    f"data.source {file} line {number}: no text under {field!r} (keys: {known}): set data.textField"
                )
            yield Piece(record[field])


def _column(file: Path, field: str, names: list[str]) -> None:
    if field not in names:
        raise UserError(f"data.source {file}: no column {field!r} (columns: {', '.join(names)}): set data.textField")


def _texts(file: Path, column: Any) -> Iterator[Piece]:
    for value in column.to_pylist():
        if value is not None:
            if not isinstance(value, str):
                raise UserError(
                    f"data.source {file}: the column holds {type(value).__name__}, not text: set data.textField"
                )
            yield Piece(value)


def _read_parquet(file: Path, field: str) -> Iterator[Piece]:
    from pyarrow import ArrowException, parquet  # noqa: PLC0415 - only Parquet data pays for it

    try:
        with parquet.ParquetFile(file) as table:
            _column(file, field, table.schema_arrow.names)
            for batch in table.iter_batches(columns=[field]):
                yield from _texts(file, batch.column(0))
    except ArrowException as error:
        raise UserError(
            f"data.source {file}: not a Parquet file ({' '.join(str(error).split())}): replace it"
        ) from error


def _read_arrow(file: Path, field: str) -> Iterator[Piece]:
    import pyarrow as pa  # noqa: PLC0415 - only Arrow data pays for it

    try:
        with pa.memory_map(str(file)) as memory:
            try:
                reader: Any = pa.ipc.open_file(memory)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            except pa.ArrowInvalid:  # the streaming format, as `datasets` writes it
                memory.seek(0)
                reader = batches = pa.ipc.open_stream(memory)
            _column(file, field, reader.schema.names)
            for batch in batches:
                yield from _texts(file, batch.column(field))
    except pa.ArrowException as error:
        raise UserError(
            f"data.source {file}: not an Arrow file ({' '.join(str(error).split())}): replace it"
        ) from error


_READERS = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet, ".arrow": _read_arrow}


@dataclass(frozen=True, slots=True)
class HubDataset:
    """The training split of a Hugging Face data set, `owner/name` or `owner/name:configuration`."""

    name: str
    text_field: str

    def identity(self, memo: Path) -> str:  # noqa: ARG002 - other sources need it
        """The name: asking for a fingerprint would load the data set at every start."""
        return hashlib.sha256(f"hub\0{self.name}\0{self.text_field}".encode()).hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """The rows of the training split."""
        import datasets  # noqa: PLC0415 - takes two seconds, only for the first tokenisation

        name, _, configuration = self.name.partition(":")
        try:
            rows = datasets.load_dataset(name, configuration or None, split="train")
        except Exception as error:
            raise UserError(
                f"data.source {self.name}: neither a local file or folder nor a data set that could be loaded "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): correct the name or use a local file"
            ) from error
        _column(Path(self.name), self.text_field, rows.column_names)
        for batch in rows.select_columns([self.text_field]).iter(1000):
            for value in batch[self.text_field]:
                if isinstance(value, str):
                    yield Piece(value)
