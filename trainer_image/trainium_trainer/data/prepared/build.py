"""Tokenize sources into a prepared folder by worker processes, for `prepare-data` and for the cache.

Guarantees:
- The folder is a pure function of sources and tokenizer, whatever the number of processes and however often the work
  was killed.
- It is built once, whatever number of processes need it at the same time.
- Everything is written beside the folder, in `<folder>.partial`, and one rename makes it the folder, with the manifest
  in it.
- Each finished file of tokens has a note of where the source continues, written after it. A partial folder that was
  made from anything else is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_contract.trainer.data import BosToken
from trainium_trainer.data.prepared.prepared import (
    FORMAT,
    INDEX_FILE,
    MANIFEST_FILE,
    PreparedManifest,
    Shard,
    column_of,
    is_prepared,
    read_manifest,
)
from trainium_trainer.data.sources.documents import FileBlock, refuse_skipped, refuse_skipped_share
from trainium_trainer.data.tokens.encoding import encode, held_back, install, list_blocks, token_type
from trainium_trainer.data.tokens.tokenizer import (
    AS_IT_IS,
    TOKENIZER_FILE,
    BosPrefix,
    count_entries,
    digest_of,
    end_facts,
    write_tokenizer,
)
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from trainium_trainer.data.tokens.encoding import SourceSpec, TokenBlock


_BATCH_TOKENS = 1 << 20
_EXAMPLES = 5
_PLAN = "plan.json"


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a file lock; the kernel drops it when the holder dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that it is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


class PartialFolder:
    """A prepared folder in the making."""

    def __init__(self, folder: Path, key: str) -> None:
        """Open what a killed predecessor left, when it was made from the same; else an empty one.

        UserError when there is a folder of that name that no predecessor made.
        """
        self.folder = folder
        self.path = folder.with_name(folder.name + ".partial")
        plan = self.path / _PLAN
        if not plan.exists() and self.path.exists() and {each.name for each in self.path.iterdir()} - {f"{_PLAN}.tmp"}:
            raise UserError(f"{self.path}: is there already and is no unfinished prepared data: choose another folder")
        if not plan.exists() or json.loads(plan.read_text(encoding="utf-8")) != key:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
            write_durably(plan, json.dumps(key))
        self.shards: list[Shard] = []
        while (note := self._note(len(self.shards))).exists():
            document = json.loads(note.read_text(encoding="utf-8"))
            self.shards.append(Shard(**(document | {"examples": tuple(document["examples"])})))

    def _note(self, number: int) -> Path:
        return self.path / f"tokens-{number:05d}.json"

    @property
    def blocks(self) -> int:
        """Blocks of the source that are done."""
        return self.shards[-1].blocks if self.shards else 0

    @property
    def tokens(self) -> int:
        """Tokens that are done."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents that are done."""
        return sum(shard.documents for shard in self.shards)

    @property
    def skipped(self) -> int:
        """Lines that were skipped."""
        return sum(shard.skipped for shard in self.shards)

    def writer(self, dtype: np.dtype[Any], end: int) -> ShardWriter:
        """Return a writer of the next file."""
        return ShardWriter(self.path / f"tokens-{len(self.shards):05d}.arrow", dtype, end)

    def take(self, writer: ShardWriter, blocks: int) -> None:
        """Finish a file: from now on it need not be made again."""
        shard = writer.finish(blocks)
        write_durably(self._note(len(self.shards)), json.dumps(asdict(shard)))
        self.shards.append(shard)

    def publish(self, manifest: PreparedManifest) -> None:
        """Write index and manifest and give the folder its name."""
        self._write_index()
        write_durably(self.path / MANIFEST_FILE, manifest.to_json())
        self.path.rename(self.folder)
        for note in (*self.folder.glob("tokens-*.json"), self.folder / _PLAN):  # not before: they are the way back
            note.unlink(missing_ok=True)
        descriptor = os.open(self.folder.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _write_index(self) -> None:
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        rows: dict[str, list[int]] = {"shard": [], "batch": [], "tokens": [], "pieces": []}
        for number, shard in enumerate(self.shards):
            with pa.memory_map(str(self.path / shard.file)) as stream:
                reader = pa.ipc.open_file(stream)
                for index in range(reader.num_record_batches):
                    column = reader.get_batch(index).column("tokens")
                    for name, value in zip(rows, (number, index, len(column.values), len(column)), strict=True):
                        rows[name].append(value)
        table = pa.table({name: column_of(np.array(values, np.int64)) for name, values in rows.items()})
        temporary = self.path / "index.tmp"
        with temporary.open("wb") as stream:
            with pa.ipc.new_file(stream, table.schema) as writer:
                writer.write_table(table)
            os.fsync(stream.fileno())
        temporary.replace(self.path / INDEX_FILE)


@dataclass(slots=True)
class ShardWriter:
    """One file of tokens that is being written."""

    path: Path
    dtype: np.dtype[Any]
    end: int
    tokens: int = 0
    documents: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    _largest: int = 0
    _digest: Any = field(default_factory=hashlib.sha256)
    _waiting: list[TokenBlock] = field(default_factory=list)
    _waiting_tokens: int = 0
    _stream: Any = None
    _file: Any = None

    def add(self, block: TokenBlock) -> None:
        """Append a block; small ones are put together."""
        self.skipped += len(block.skipped)
        space = _EXAMPLES - len(self.examples)
        self.examples += [skipped.sentence() for skipped in block.skipped[:space]]
        if not len(block.tokens):
            return
        self.tokens += len(block.tokens)
        self.documents += int((block.tokens == self.end).sum())
        self._largest = max(self._largest, int(block.tokens.max()))
        self._digest.update(block.tokens.tobytes())
        self._waiting.append(block)
        self._waiting_tokens += len(block.tokens)
        if self._waiting_tokens >= _BATCH_TOKENS:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        lengths: NDArray[np.int64] = np.concatenate([block.lengths for block in self._waiting])
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        values = column_of(np.concatenate([block.tokens for block in self._waiting]))
        tokens = pa.LargeListArray.from_arrays(column_of(offsets), values)
        documents = column_of(np.concatenate([block.documents for block in self._waiting]))
        batch = pa.record_batch([tokens, documents], names=["tokens", "document"])
        if self._file is None:
            self._open(batch.schema)
        self._file.write_batch(batch)
        self._waiting, self._waiting_tokens = [], 0

    def _open(self, schema: Any) -> None:
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        self._stream = self.path.with_suffix(".tmp").open("wb")
        self._file = pa.ipc.new_file(self._stream, schema)

    def finish(self, blocks: int) -> Shard:
        """Close the file and give it its name."""
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        if self._waiting:
            self._write()
        if self._file is None:  # nothing but skipped lines
            kinds = {"tokens": pa.large_list(pa.from_numpy_dtype(self.dtype)), "document": pa.uint64()}
            self._open(pa.schema(kinds))
        self._file.close()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self.path.with_suffix(".tmp").replace(self.path)
        return Shard(
            file=self.path.name,
            bytes=self.path.stat().st_size,
            tokens=self.tokens,
            documents=self.documents,
            largest=self._largest,
            digest=self._digest.hexdigest(),
            blocks=blocks,
            skipped=self.skipped,
            examples=tuple(self.examples),
        )


BLOCK_BYTES = 4 << 20
_SHARD_TOKENS = 64 << 20
_MOST_WORKERS = 16


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Only what is held back of one source, and no more of it than is needed."""

    fraction: float | None
    """Share of the documents, by their hash; None: all documents of the blocks."""
    enough: int
    """Tokens after which no further block is read."""
    table: str
    """A file with the source's blocks."""
    first: int
    """The first block that is read."""


@dataclass(frozen=True, slots=True)
class PreparedRecipe:
    """Inputs of a prepared folder."""

    specs: tuple[SourceSpec, ...]
    tokenizer: Path
    max_bad_lines: int | None
    held_back: HeldBack | None = None
    beginning: BosPrefix = AS_IT_IS

    @property
    def name(self) -> str:
        """The sources, for sentences."""
        return ", ".join(spec.name for spec in self.specs)

    def key(self, memo: Path | None) -> str:
        """Digest of all that the result depends on. Raises UserError or StorageError."""
        parts: list[Any] = [FORMAT, digest_of(self.tokenizer), [spec.open().identity(memo) for spec in self.specs]]
        if self.held_back is not None:
            held = self.held_back
            parts.append([held.fraction, held.enough, held.first, Path(held.table).name])
        if facts := self.beginning.facts():
            parts.append({"bos": facts})
        if end := end_facts(self.tokenizer):
            parts.append(end)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Progress of a build."""

    bytes: int
    total_bytes: int
    documents: int
    tokens: int
    skipped: int
    resumed_tokens: int
    """Tokens that an earlier, killed run has left."""


def count_processes(wanted: int | None) -> int:
    """Return the number of tokenizing processes of a node."""
    return wanted or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


def build(
    folder: Path,
    recipe: PreparedRecipe,
    key: str,
    *,
    workers: int | None = None,
    progress: Callable[[BuildProgress], None] = lambda _: None,
    shard_tokens: int = _SHARD_TOKENS,
) -> PreparedManifest:
    """Make `folder`, unless it is there. Raises UserError, StorageError, WorkerError, OSError."""
    if not is_prepared(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_name(f".{folder.name}.lock")):
            if not is_prepared(folder):
                if folder.exists():
                    raise UserError(f"{folder}: is there already and is not prepared data: choose another folder")
                _make(PartialFolder(folder, key), recipe, key, workers, progress, shard_tokens)
    manifest = read_manifest(folder)
    if manifest.key != key:
        raise UserError(f"{folder}: holds other prepared data: choose another folder, or remove this one")
    if manifest.skipped:
        first, limit = manifest.examples[0], recipe.max_bad_lines
        refuse_skipped(manifest.skipped, first, limit)
        if recipe.held_back is None and not any(spec.open().has_lines for spec in recipe.specs):
            refuse_skipped_share(recipe.name, manifest.skipped, manifest.documents + manifest.skipped, first, limit)
    return manifest


def _make(
    partial: PartialFolder,
    recipe: PreparedRecipe,
    key: str,
    workers: int | None,
    progress: Callable[[BuildProgress], None],
    shard_tokens: int,
) -> PreparedManifest:
    tokenizer = partial.path / TOKENIZER_FILE
    for name, text in write_tokenizer(recipe.tokenizer).items():
        write_durably(partial.path / name, text)
    vocabulary = count_entries(tokenizer)
    prepare = (install, (recipe.specs, str(tokenizer), recipe.beginning))
    with Workers(1, prepare) as pool:
        end: int = pool.prepared
        blocks = _blocks(recipe, pool)
        left = blocks[partial.blocks :]
        pool.grow(min(count_processes(workers), len(left)))
        results = _counted(pool.map(encode, left), left, partial, blocks, progress)
        _write(partial, recipe, _selected(results, recipe.held_back), token_type(vocabulary), end, shard_tokens)
    if not partial.tokens and recipe.held_back is None:
        examples = [example for shard in partial.shards for example in shard.examples]
        why = f" ({partial.skipped} lines were skipped, the first: {examples[0]})" if examples else ""
        raise UserError(f"data.source {recipe.name}: holds no text{why}: give a source with text in it")
    return _publish(partial, recipe, key, vocabulary, end)


def _blocks(recipe: PreparedRecipe, pool: Workers) -> list[tuple[int, FileBlock]]:
    """Source and block of all that is read."""
    held = recipe.held_back
    if held is not None:
        return [(0, FileBlock(*row)) for row in np.load(held.table)[held.first :].tolist()]
    return [
        (number, block)
        for number, spec in enumerate(recipe.specs)
        for block in pool.call(list_blocks, spec, BLOCK_BYTES)
    ]


def _counted(
    results: Iterator[list[TokenBlock]],
    left: list[tuple[int, FileBlock]],
    partial: PartialFolder,
    blocks: list[tuple[int, FileBlock]],
    progress: Callable[[BuildProgress], None],
) -> Iterator[list[TokenBlock]]:
    """Pass results on and report them."""
    total = sum(block.size for _, block in blocks)
    done = total - sum(block.size for _, block in left)
    tokens, documents, skipped, resumed = partial.tokens, partial.documents, partial.skipped, partial.tokens
    progress(BuildProgress(done, total, documents, tokens, skipped, resumed))
    for (_, block), encoded in zip(left, results, strict=True):
        done += block.size
        tokens += sum(len(part.tokens) for part in encoded)
        skipped += sum(len(part.skipped) for part in encoded)
        documents += sum(len(np.unique(part.documents)) for part in encoded)
        yield encoded
        progress(BuildProgress(done, total, documents, tokens, skipped, resumed))


def _selected(results: Iterator[list[TokenBlock]], held: HeldBack | None) -> Iterator[list[TokenBlock]]:
    if held is None:
        yield from results
        return
    gathered = 0
    for encoded in results:
        kept = encoded
        if held.fraction is not None:
            kept = [select(block, held_back(block.documents, held.fraction)) for block in encoded]
        gathered += sum(len(block.tokens) for block in kept)
        yield kept
        if gathered >= held.enough:
            return


def select(block: TokenBlock, chosen: Any) -> TokenBlock:
    """Return the chosen pieces of a block, and what was skipped in it."""
    return replace(
        block,
        tokens=block.tokens[np.repeat(chosen, block.lengths)],
        lengths=block.lengths[chosen],
        documents=block.documents[chosen],
    )


def _write(
    partial: PartialFolder,
    recipe: PreparedRecipe,
    results: Iterable[list[TokenBlock]],
    dtype: np.dtype[Any],
    end: int,
    shard_tokens: int,
) -> None:
    """Write results to files of tokens, as many as it takes."""
    done, skipped = partial.blocks, partial.skipped
    writer = partial.writer(dtype, end)
    used = False
    for encoded in results:
        used = True
        done += 1
        for block in encoded:
            for one in block.skipped:
                skipped += 1
                refuse_skipped(skipped, one, recipe.max_bad_lines)
            writer.add(block)
        if writer.tokens >= shard_tokens:
            partial.take(writer, done)
            writer, used = partial.writer(dtype, end), False
    if used:
        partial.take(writer, done)


def _publish(partial: PartialFolder, recipe: PreparedRecipe, key: str, vocabulary: int, end: int) -> PreparedManifest:
    digest = hashlib.sha256("".join(shard.digest for shard in partial.shards).encode())
    examples = [example for shard in partial.shards for example in shard.examples]
    manifest = PreparedManifest(
        key=key,
        identity=digest.hexdigest(),
        sources=tuple(spec.name for spec in recipe.specs),
        tokens=partial.tokens,
        documents=partial.documents,
        skipped=partial.skipped,
        examples=tuple(examples[:5]),
        vocabulary=vocabulary,
        dtype=token_type(vocabulary).name,
        end_of_document=end,
        tokenizer=digest_of(partial.path / TOKENIZER_FILE),
        shards=tuple(partial.shards),
        beginning=recipe.beginning.tokens if recipe.beginning.rule is BosToken.ALWAYS else (),
    )
    partial.publish(manifest)
    return manifest
