"""Read prepared data: a folder of Arrow files with tokens, an index, a tokenizer and a manifest.

    manifest.json          written last: a folder that has it is whole
    tokenizer.json         the tokenizer of the ids
    tokenizer_config.json  the token that ends documents, where the tokenizer has no usual one
    index.arrow            one row for each record batch: file, number in it, tokens, pieces of documents
    tokens-00000.arrow     record batches of `tokens` (list of uint16 or uint32) and `document` (hash, uint64)

A cache of examples has the same files but for the tokenizer's, and three more columns (`examples/store.py`).

Guarantees:
- All documents are in the order of the source, each with its end-of-document token.
- Files are memory-mapped, and a sample is read only from the batches that it overlaps.
- A file whose size differs from the manifest is refused before it is read.
- Numbers are converted to and from Arrow without Arrow's conversions, which import pandas if it is installed: half of a
  rank's import time.
"""

from __future__ import annotations

import functools
import io
import json
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from trainium_trainer.data.cache import write_cache_file
from trainium_trainer.data.tokens.encoding import RecordCounts, select_held_back
from trainium_trainer.data.tokens.tokenizer import TOKENIZER_FILE
from trainium_trainer.exits import UnreadableError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


def to_arrow(numbers: NDArray[Any]) -> Any:
    """Wrap numbers in an Arrow array; they must not be changed afterwards."""
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    numbers = np.ascontiguousarray(numbers)
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(numbers)])


def from_arrow(column: Any) -> NDArray[Any]:
    """Return the numbers of an Arrow array without nulls, as a read-only view."""
    return np.from_dlpack(column)


FORMAT = 3
KIND = "trainium-trainer tokens"
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.arrow"
_OPEN_BATCHES = 256


_check_share: ContextVar[tuple[int, int]] = ContextVar("check_share", default=(0, 1))
"""The index of this process among those that check the files of a folder, and their number."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of tokens."""

    file: str
    bytes: int
    tokens: int
    documents: int
    largest: int
    """The largest token id of the file."""
    digest: str
    """The SHA-256 of the tokens in memory."""
    blocks: int
    """The number of blocks of the source up to the end of this file."""
    skipped: int
    """The number of unusable lines."""
    examples: tuple[str, ...]
    """Messages about the first of them."""
    counts: RecordCounts | None = None
    """The counts of records; None for documents."""

    @staticmethod
    def from_json(document: dict[str, Any]) -> Shard:
        """Parse the result of `asdict`. Raises KeyError or TypeError for anything else."""
        counts_json = document.get("counts")
        counts = None if counts_json is None else RecordCounts(**counts_json)
        return Shard(**(document | {"examples": tuple(document["examples"]), "counts": counts}))


@dataclass(frozen=True, slots=True)
class PreparedManifest:
    """The contents of a prepared folder."""

    key: str
    """The digest of everything from which the folder was built."""
    identity: str
    """The digest of the tokens."""
    sources: tuple[str, ...]
    tokens: int
    documents: int
    skipped: int
    examples: tuple[str, ...]
    vocabulary: int
    dtype: str
    end_of_document: int
    tokenizer: str
    """The digest of the tokenizer."""
    shards: tuple[Shard, ...]
    kind: str = KIND
    format: int = FORMAT
    bos_tokens: tuple[int, ...] = ()
    """The BOS tokens before every document; omitted if none was added."""

    @property
    def counts(self) -> RecordCounts:
        """The counts of records by outcome."""
        total = RecordCounts()
        for shard in self.shards:
            total.add(shard.counts or RecordCounts())
        return total

    def to_json(self) -> str:
        """Return the file's text."""
        document = asdict(self)
        if not self.bos_tokens:  # readable by every version of this format
            del document["bos_tokens"]
        for shard in document["shards"]:
            if shard["counts"] is None:
                del shard["counts"]
        return json.dumps(document, indent=1) + "\n"


def is_prepared(folder: Path) -> bool:
    """Return whether a folder claims to be prepared data."""
    return (folder / MANIFEST_FILE).is_file()


def read_manifest(folder: Path) -> PreparedManifest:
    """Read the manifest of a folder. Raises UserError if it is invalid or of a newer version."""
    file = folder / MANIFEST_FILE
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if (document["kind"], document["format"]) != (KIND, FORMAT):
            _refuse_format(folder, document)
        shards = tuple(map(Shard.from_json, document["shards"]))
        lists = {name: tuple(document.get(name, ())) for name in ("sources", "examples", "bos_tokens")}
        return PreparedManifest(**(document | lists | {"shards": shards}))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"data.source {folder}: {MANIFEST_FILE} is not that of prepared data: copy it again") from error


def _refuse_format(folder: Path, document: dict[str, Any]) -> NoReturn:
    if document["kind"] != KIND:
        raise UserError(f"data.source {folder}: {MANIFEST_FILE} is not that of prepared data: name another folder")
    raise UserError(
        f"data.source {folder}: was prepared in format {document['format']}, this version reads {FORMAT}: "
        "prepare the data again with this version"
    )


@contextmanager
def divide_file_checks(number: int, processes: int) -> Iterator[None]:
    """Divide the check of the files of folders opened in this context among the `processes` of a node.

    Each process checks only its share, because otherwise every process of the fleet would stat tens of thousands of
    files. A file is checked again when it is opened.
    """
    token = _check_share.set((number, processes))
    try:
        yield
    finally:
        _check_share.reset(token)


class PreparedData:
    """An open prepared folder, read as one sequence of tokens."""

    def __init__(self, folder: Path) -> None:
        """Open the folder and check the sizes of this process's share of its files. Raises UserError, OSError."""
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        self.folder = folder
        self.manifest = read_manifest(folder)
        number, processes = _check_share.get()
        for shard in self.manifest.shards[number::processes]:
            self._check(shard)
        try:
            with pa.memory_map(str(folder / INDEX_FILE)) as stream:
                index = pa.ipc.open_file(stream).read_all()
            names = ("shard", "batch", "tokens", "pieces")
            columns = {name: from_arrow(index.column(name).combine_chunks()).copy() for name in names}
        except (pa.ArrowException, OSError, KeyError) as error:
            raise UserError(f"data.source {folder / INDEX_FILE}: cannot be read ({error}): copy it again") from error
        self._shard, self._batch = columns["shard"], columns["batch"]
        self.batch_tokens: NDArray[np.int64] = columns["tokens"]
        self.ends: NDArray[np.int64] = np.cumsum(columns["tokens"])
        self.piece_ends: NDArray[np.int64] = np.cumsum(columns["pieces"])
        if int(columns["tokens"].sum()) != self.manifest.tokens:
            raise UserError(f"data.source {folder}: index and manifest do not agree: copy the folder again")
        self.batch = functools.lru_cache(maxsize=_OPEN_BATCHES)(self._open_batch)
        self._reader = functools.lru_cache(maxsize=_OPEN_BATCHES)(self._open_shard)

    @property
    def tokens(self) -> int:
        """The number of tokens of the folder."""
        return self.manifest.tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the tokens."""
        return np.dtype(self.manifest.dtype)

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's file."""
        return self.folder / TOKENIZER_FILE

    def _check(self, shard: Shard) -> None:
        file = self.folder / shard.file
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            size = None
        if size != shard.bytes:
            problem = "is missing" if size is None else f"has {size} bytes, not {shard.bytes}"
            raise UnreadableError(
                f"data.source {file}: {problem}: copy it again, or prepare the data again (in a cache: remove "
                f"{self.folder})"
            )

    def _open_shard(self, number: int) -> Any:
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        self._check(self.manifest.shards[number])  # another process of the node may have checked it at the start
        file = self.folder / self.manifest.shards[number].file
        try:
            return pa.ipc.open_file(pa.memory_map(str(file)))
        except pa.ArrowException as error:
            raise UserError(f"data.source {file}: not an Arrow file ({error}): copy it again") from error

    def read_arrow_batch(self, number: int) -> Any:
        """Return a record batch."""
        return self._reader(int(self._shard[number])).get_batch(int(self._batch[number]))

    def _open_batch(self, number: int) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint64]]:
        """Return tokens, piece boundaries (one more than pieces) and document hashes of a record batch."""
        batch = self.read_arrow_batch(number)
        column = batch.column("tokens")
        starts = from_arrow(column.offsets)
        values = from_arrow(column.values)
        return values, starts, from_arrow(batch.column("document"))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens start .. stop - 1 of the folder."""
        parts = []
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            begin = int(self.ends[number] - self.batch_tokens[number])
            end = min(stop, int(self.ends[number]))
            parts.append(self.batch(number)[0][start - begin : end - begin])
            start, number = end, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, self.dtype)


class DocumentSelection:
    """The held-back documents of a prepared folder, or the others, read as one sequence of tokens."""

    def __init__(self, prepared: PreparedData, fraction: float, *, validation: bool, cache_folder: Path | None) -> None:
        self._prepared = prepared
        self._fraction = fraction
        self._validation = validation
        cached_file = f"{prepared.manifest.identity[:32]}-{fraction!r}-{'held' if validation else 'kept'}.npy"
        counts = self._count_tokens(cache_folder / cached_file if cache_folder else None)
        self.ends: NDArray[np.int64] = np.cumsum(counts)
        self.tokens = int(counts.sum())
        self.dtype = prepared.dtype
        self._rows = functools.lru_cache(maxsize=_OPEN_BATCHES)(self._select)

    def _count_tokens(self, cached_file: Path | None) -> NDArray[np.int64]:
        """Count the selected tokens of each record batch; cached, because every document is read."""
        number = len(self._prepared.batch_tokens)
        if cached_file is not None and cached_file.exists():
            counts: NDArray[np.int64] = np.load(cached_file)
            if len(counts) == number:
                return counts
        counts = np.array([self._select(index)[1].sum() for index in range(number)], np.int64)
        if cached_file is not None:
            content = io.BytesIO()
            np.save(content, counts)
            write_cache_file(cached_file, content.getvalue())
        return counts

    def _select(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return starts, lengths and ends (among the selected) of the selected pieces of a batch."""
        _, starts, documents = self._prepared.batch(number)
        chosen = select_held_back(documents, self._fraction) == self._validation
        lengths = np.diff(starts)[chosen]
        return starts[:-1][chosen], lengths, np.cumsum(lengths)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens start .. stop - 1 of the selection."""
        parts: list[NDArray[Any]] = []
        number = int(np.searchsorted(self.ends, start, side="right"))
        base = int(self.ends[number - 1]) if number else 0
        while start < stop:
            values = self._prepared.batch(number)[0]
            starts, lengths, ends = self._rows(number)
            row = int(np.searchsorted(ends, start - base, side="right"))
            while row < len(ends) and start < stop:
                inside = start - base - int(ends[row] - lengths[row])
                count = min(int(lengths[row]) - inside, stop - start)
                begin = int(starts[row]) + inside
                parts.append(values[begin : begin + count])
                start, row = start + count, row + 1
            base = int(self.ends[number])
            number += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, self.dtype)


class TokenRange:
    """Tokens first .. end - 1 of a prepared folder."""

    def __init__(self, sequence: PreparedData, first: int, end: int) -> None:
        self._sequence = sequence
        self._first = first
        self.tokens = end - first

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens start .. stop - 1 of this range."""
        return self._sequence.read(self._first + start, self._first + stop)
