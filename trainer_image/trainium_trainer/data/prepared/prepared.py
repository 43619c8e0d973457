"""Read prepared data: a folder of Arrow files with tokens, an index, a tokenizer and a manifest.

    manifest.json          written last: a folder that has it is whole
    tokenizer.json         the tokenizer of the ids
    tokenizer_config.json  the token that ends documents, where the tokenizer has no usual one
    index.arrow            one row for each record batch: file, number in it, tokens, pieces of documents
    tokens-00000.arrow     record batches of `tokens` (list of uint16 or uint32) and `document` (hash, uint64)

A cache of examples has the same files but for the tokenizer's, and three more columns (`examples/store.py`).

Guarantees:
- All documents are in the order of the source, each with its end-of-document token.
- Files are mapped into memory, and a sample is read from the batches that it touches.
- A file of another size than in the manifest is refused before anything is read from it.
- Numbers go into Arrow's columns and out of them without pandas, which Arrow's conversions import where it is
  installed: half of what a rank would import.
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

from trainium_trainer.data.tokens.encoding import Counts, held_back
from trainium_trainer.data.tokens.tokenizer import TOKENIZER_FILE
from trainium_trainer.exits import UnreadableError, UserError
from trainium_trainer.storage.posix import remember

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


def column_of(numbers: NDArray[Any]) -> Any:
    """Return the Arrow array of some numbers, which must not be changed afterwards."""
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    numbers = np.ascontiguousarray(numbers)
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(numbers)])


def numbers_of(column: Any) -> NDArray[Any]:
    """Return the numbers of an Arrow array without nulls: read-only, in the array's own memory."""
    return np.from_dlpack(column)


FORMAT = 3
KIND = "trainium-trainer tokens"
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.arrow"
_OPEN_BATCHES = 256


_watched: ContextVar[tuple[int, int]] = ContextVar("watched", default=(0, 1))
"""Number of this process among those that look at the files of a folder, and how many they are."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of tokens."""

    file: str
    bytes: int
    tokens: int
    documents: int
    largest: int
    """The largest token id."""
    digest: str
    """sha256 of the tokens as they lie in memory."""
    blocks: int
    """Blocks of the source that have been taken, up to the end of this file."""
    skipped: int
    """Lines that could not be used."""
    examples: tuple[str, ...]
    """Sentences about the first of them."""
    counts: Counts | None = None
    """Numbers of records; None for documents."""

    @staticmethod
    def from_json(document: dict[str, Any]) -> Shard:
        """Return what `asdict` gave. Raises KeyError or TypeError for anything else."""
        given = document.get("counts")
        counts = None if given is None else Counts(**given)
        return Shard(**(document | {"examples": tuple(document["examples"]), "counts": counts}))


@dataclass(frozen=True, slots=True)
class PreparedManifest:
    """Contents of a prepared folder."""

    key: str
    """Digest of everything that the folder was made from."""
    identity: str
    """Digest of the tokens."""
    sources: tuple[str, ...]
    tokens: int
    documents: int
    skipped: int
    examples: tuple[str, ...]
    vocabulary: int
    dtype: str
    end_of_document: int
    tokenizer: str
    """Digest of the tokenizer."""
    shards: tuple[Shard, ...]
    kind: str = KIND
    format: int = FORMAT
    beginning: tuple[int, ...] = ()
    """BOS tokens that every document begins with; omitted: none was put there."""

    @property
    def counts(self) -> Counts:
        """Numbers of records by what was done with them."""
        total = Counts()
        for shard in self.shards:
            total.add(shard.counts or Counts())
        return total

    def to_json(self) -> str:
        """Return the file's text."""
        document = asdict(self)
        if not self.beginning:  # as every version of this format can read it
            del document["beginning"]
        for shard in document["shards"]:
            if shard["counts"] is None:
                del shard["counts"]
        return json.dumps(document, indent=1) + "\n"


def is_prepared(folder: Path) -> bool:
    """Return whether a folder claims to be prepared data."""
    return (folder / MANIFEST_FILE).is_file()


def read_manifest(folder: Path) -> PreparedManifest:
    """Return the manifest of a folder. Raises UserError when it is none, or one of a newer version."""
    file = folder / MANIFEST_FILE
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if (document["kind"], document["format"]) != (KIND, FORMAT):
            _refuse_format(folder, document)
        shards = tuple(map(Shard.from_json, document["shards"]))
        lists = {name: tuple(document.get(name, ())) for name in ("sources", "examples", "beginning")}
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
def watching(number: int, processes: int) -> Iterator[None]:
    """Folders that are opened within have every file looked at once by the `processes` of a node, this one's number.

    Each looks at its share only: tens of thousands of files are otherwise asked for by every process of the fleet. A
    file is looked at again when it is opened.
    """
    token = _watched.set((number, processes))
    try:
        yield
    finally:
        _watched.reset(token)


class Prepared:
    """An open prepared folder: one long run of tokens."""

    def __init__(self, folder: Path) -> None:
        """Open the folder and check the sizes of this process's share of its files. Raises UserError, OSError."""
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        self.folder = folder
        self.manifest = read_manifest(folder)
        number, processes = _watched.get()
        for shard in self.manifest.shards[number::processes]:
            self._check(shard)
        try:
            with pa.memory_map(str(folder / INDEX_FILE)) as stream:
                index = pa.ipc.open_file(stream).read_all()
            names = ("shard", "batch", "tokens", "pieces")
            columns = {name: numbers_of(index.column(name).combine_chunks()).copy() for name in names}
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
        """Tokens of the folder."""
        return self.manifest.tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens."""
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
            found = "is missing" if size is None else f"has {size} bytes, not {shard.bytes}"
            raise UnreadableError(
                f"data.source {file}: {found}: copy it again, or prepare the data again (in a cache: remove "
                f"{self.folder})"
            )

    def _open_shard(self, number: int) -> Any:
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        self._check(self.manifest.shards[number])  # at the start another process of the node may have looked at it
        file = self.folder / self.manifest.shards[number].file
        try:
            return pa.ipc.open_file(pa.memory_map(str(file)))
        except pa.ArrowException as error:
            raise UserError(f"data.source {file}: not an Arrow file ({error}): copy it again") from error

    def arrow_batch(self, number: int) -> Any:
        """Return a record batch."""
        return self._reader(int(self._shard[number])).get_batch(int(self._batch[number]))

    def _open_batch(self, number: int) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint64]]:
        """Tokens, starts of the pieces (one more than there are) and hashes of the documents of a record batch."""
        batch = self.arrow_batch(number)
        column = batch.column("tokens")
        starts = numbers_of(column.offsets)
        values = numbers_of(column.values)
        return values, starts, numbers_of(batch.column("document"))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start .. stop - 1 of the folder."""
        parts = []
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            begin = int(self.ends[number] - self.batch_tokens[number])
            end = min(stop, int(self.ends[number]))
            parts.append(self.batch(number)[0][start - begin : end - begin])
            start, number = end, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, self.dtype)


class Selection:
    """The documents of a prepared folder that are held back for validation, or the others, as one run of tokens."""

    def __init__(self, prepared: Prepared, fraction: float, *, validation: bool, memo: Path | None) -> None:
        self._prepared = prepared
        self._fraction = fraction
        self._validation = validation
        note = f"{prepared.manifest.identity[:32]}-{fraction!r}-{'held' if validation else 'kept'}.npy"
        counts = self._counts(memo / note if memo else None)
        self.ends: NDArray[np.int64] = np.cumsum(counts)
        self.tokens = int(counts.sum())
        self.dtype = prepared.dtype
        self._rows = functools.lru_cache(maxsize=_OPEN_BATCHES)(self._select)

    def _counts(self, note: Path | None) -> NDArray[np.int64]:
        """Count the selected tokens of each record batch; remembered, since every document is read."""
        number = len(self._prepared.batch_tokens)
        if note is not None and note.exists():
            counts: NDArray[np.int64] = np.load(note)
            if len(counts) == number:
                return counts
        counts = np.array([self._select(index)[1].sum() for index in range(number)], np.int64)
        if note is not None:
            content = io.BytesIO()
            np.save(content, counts)
            remember(note, content.getvalue())
        return counts

    def _select(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return starts, lengths and ends (among the selected) of the selected pieces of a batch."""
        _, starts, documents = self._prepared.batch(number)
        chosen = held_back(documents, self._fraction) == self._validation
        lengths = np.diff(starts)[chosen]
        return starts[:-1][chosen], lengths, np.cumsum(lengths)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start .. stop - 1 of the selection."""
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


class Stretch:
    """Tokens first .. last - 1 of another run."""

    def __init__(self, run: Prepared | Selection, first: int, last: int) -> None:
        self._run = run
        self._first = first
        self.tokens = last - first
        self.dtype = run.dtype

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start .. stop - 1 of the stretch."""
        return self._run.read(self._first + start, self._first + stop)
