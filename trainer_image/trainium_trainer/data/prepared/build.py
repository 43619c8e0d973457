"""Build a prepared folder by worker processes: of text for `prepare-data` and the cache, of examples for the cache.

Guarantees:
- The folder is a pure function of sources and recipe, whatever the number of processes and however often the work was
  killed.
- It is built once, whatever number of processes need it at the same time.
- Everything is written beside the folder, in `<folder>.partial`, and one rename makes it the folder, with the manifest
  in it.
- Each finished file of tokens has a note of where the source continues, written after it. A partial folder that was
  made from anything else is removed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
from trainium_trainer.data.tokens.encoding import (
    Counts,
    TokenBlock,
    encode,
    held_back,
    install,
    list_blocks,
    token_type,
)
from trainium_trainer.data.tokens.tokenizer import (
    AS_IT_IS,
    BosPrefix,
    digest_of,
    end_facts,
    write_tokenizer,
)
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trainium_trainer.data.sources.resolve import SourceSpec


_BATCH_TOKENS = 1 << 20
_EXAMPLES = 5
_PLAN = "plan.json"
BLOCK_BYTES = 4 << 20
_SHARD_TOKENS = 64 << 20
_MOST_WORKERS = 16


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a file lock; the kernel drops it when the holder dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_durably(path: Path, text: str) -> None:
    """Write a small file so that it is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


# ---- what is built --------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInputs:
    """Inputs of a prepared folder, and how they are encoded."""

    name: str
    """The sources, for sentences."""
    specs: tuple[SourceSpec, ...]
    tokenizer: Path
    max_bad_lines: int | None
    prepare: tuple[Callable[..., tuple[int, int]], tuple[Any, ...]]
    """Called in each process; returns the vocabulary's size, and the token that ends documents or fills up."""
    encode: Callable[[int, FileBlock], list[TokenBlock]]
    """Called there with the number of a source and a block of it."""
    refuse_empty: Callable[[PreparedManifest], None]
    """Raises UserError when there is nothing to train on."""
    count_records: Callable[[PreparedManifest], int | None]
    """Return the records that were read, with those that were skipped; None where lines are no records."""
    block_bytes: int
    unit: str = "lines"
    """Name of the skipped things, for sentences."""
    files: Callable[[], Mapping[str, str]] = dict
    """Returns the texts that are in the folder beside the tokens, by name."""
    beginning: BosPrefix = AS_IT_IS
    held_back: HeldBack | None = None


@dataclass(frozen=True, slots=True)
class PreparedRecipe:
    """Text and its tokenizer."""

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
        parts: list[Any] = [FORMAT, digest_of(self.tokenizer), [spec.source.identity(memo) for spec in self.specs]]
        if self.held_back is not None:
            held = self.held_back
            parts.append([held.fraction, held.enough, held.first, Path(held.table).name])
        if facts := self.beginning.facts():
            parts.append({"bos": facts})
        if end := end_facts(self.tokenizer):
            parts.append(end)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def inputs(self) -> BuildInputs:
        """Return the inputs of a build. Raises UserError."""
        return BuildInputs(
            name=self.name,
            specs=self.specs,
            tokenizer=self.tokenizer,
            max_bad_lines=self.max_bad_lines,
            prepare=(install, (self.specs, str(self.tokenizer), self.beginning)),
            encode=encode,
            refuse_empty=self._refuse_empty,
            count_records=self._count_records,
            block_bytes=BLOCK_BYTES,
            files=functools.partial(write_tokenizer, self.tokenizer),
            beginning=self.beginning,
            held_back=self.held_back,
        )

    def _refuse_empty(self, made: PreparedManifest) -> None:
        if not made.tokens and self.held_back is None:
            why = f" ({made.skipped} lines were skipped, the first: {made.examples[0]})" if made.examples else ""
            raise UserError(f"data.source {self.name}: holds no text{why}: give a source with text in it")

    def _count_records(self, made: PreparedManifest) -> int | None:
        if self.held_back is not None or any(spec.source.has_lines for spec in self.specs):
            return None
        return made.documents + made.skipped


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


# ---- the folder in the making ---------------------------------------------------------------------------------------


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
            _write_durably(plan, json.dumps(key))
        self.shards: list[Shard] = []
        while (note := self._note(len(self.shards))).exists():
            self.shards.append(Shard.from_json(json.loads(note.read_text(encoding="utf-8"))))

    def _note(self, number: int) -> Path:
        return self.path / f"tokens-{number:05d}.json"

    @property
    def blocks(self) -> int:
        """Blocks of the source that are done."""
        return self.shards[-1].blocks if self.shards else 0

    def total(self, name: str) -> int:
        """Return the sum of a field of the finished files."""
        return sum(getattr(shard, name) for shard in self.shards)

    def writer(self, dtype: np.dtype[Any], end: int) -> ShardWriter:
        """Return a writer of the next file."""
        return ShardWriter(self.path / f"tokens-{len(self.shards):05d}.arrow", dtype, end)

    def take(self, writer: ShardWriter, blocks: int) -> None:
        """Finish a file: from now on it need not be made again."""
        shard = writer.finish(blocks)
        _write_durably(self._note(len(self.shards)), json.dumps(asdict(shard)))
        self.shards.append(shard)

    def manifest(self, inputs: BuildInputs, key: str, vocabulary: int, end: int) -> PreparedManifest:
        """Return the manifest of what is finished."""
        digest = hashlib.sha256("".join(shard.digest for shard in self.shards).encode())
        return PreparedManifest(
            key=key,
            identity=digest.hexdigest(),
            sources=tuple(spec.name for spec in inputs.specs),
            tokens=self.total("tokens"),
            documents=self.total("documents"),
            skipped=self.total("skipped"),
            examples=tuple(example for shard in self.shards for example in shard.examples)[:_EXAMPLES],
            vocabulary=vocabulary,
            dtype=token_type(vocabulary).name,
            end_of_document=end,
            tokenizer=digest_of(inputs.tokenizer),
            shards=tuple(self.shards),
            beginning=inputs.beginning.tokens if inputs.beginning.rule is BosToken.ALWAYS else (),
        )

    def publish(self, manifest: PreparedManifest) -> None:
        """Write index and manifest and give the folder its name."""
        self._write_index()
        _write_durably(self.path / MANIFEST_FILE, manifest.to_json())
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
    _counts: Counts | None = None
    _largest: int = 0
    _digests: dict[str, Any] = field(default_factory=dict)
    _waiting: list[TokenBlock] = field(default_factory=list)
    _waiting_tokens: int = 0
    _stream: Any = None
    _file: Any = None

    def add(self, block: TokenBlock) -> None:
        """Append a block; small ones are put together."""
        self.skipped += len(block.skipped)
        space = _EXAMPLES - len(self.examples)
        self.examples += [skipped.sentence() for skipped in block.skipped[:space]]
        if block.counts is not None:
            self._counts = self._counts or Counts()
            self._counts.add(block.counts)
        if not len(block.lengths):
            return
        ends = block.tokens == self.end if block.examples is None else block.lengths > 0
        self.tokens += len(block.tokens)
        self.documents += int(ends.sum())
        self._largest = max(self._largest, int(block.tokens.max(initial=0)))
        hashed = {"tokens": block.tokens}
        if block.examples is not None:
            kept = block.lengths > 0
            rows = np.stack([block.lengths, block.examples.answers, block.documents.view(np.int64)], axis=1)[kept]
            hashed |= {"trained": block.examples.trained, "rows": rows}
        for name, values in hashed.items():
            self._digests.setdefault(name, hashlib.sha256()).update(values.tobytes())
        self._waiting.append(block)
        self._waiting_tokens += len(block.tokens)
        if self._waiting_tokens >= _BATCH_TOKENS:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        lengths = np.concatenate([block.lengths for block in self._waiting])
        offsets = column_of(np.concatenate(([0], np.cumsum(lengths))))

        def lists(values: list[Any]) -> Any:
            return pa.LargeListArray.from_arrays(offsets, column_of(np.concatenate(values)))

        columns = {
            "tokens": lists([block.tokens for block in self._waiting]),
            "document": column_of(np.concatenate([block.documents for block in self._waiting])),
        }
        examples = [block.examples for block in self._waiting if block.examples is not None]
        if examples:
            columns["trained"] = lists([each.trained.view(np.uint8) for each in examples])
            columns["answer"] = column_of(np.concatenate([each.answers for each in examples]))
            columns["before"] = column_of(np.concatenate([each.before for each in examples]))
        batch = pa.record_batch(columns)
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
        digests = [each.hexdigest() for each in self._digests.values()] or [hashlib.sha256().hexdigest()]
        return Shard(
            file=self.path.name,
            bytes=self.path.stat().st_size,
            tokens=self.tokens,
            documents=self.documents,
            largest=self._largest,
            digest=digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
            blocks=blocks,
            skipped=self.skipped,
            examples=tuple(self.examples),
            counts=self._counts,
        )


# ---- the build ------------------------------------------------------------------------------------------------------


def build(
    folder: Path,
    inputs: BuildInputs,
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
                partial = PartialFolder(folder, key)
                try:
                    _make(partial, inputs, key, workers, progress, shard_tokens)
                except UserError:
                    if not partial.total("documents"):  # else it is worth continuing once the cause is corrected
                        shutil.rmtree(partial.path, ignore_errors=True)
                    raise
    manifest = read_manifest(folder)
    if manifest.key != key:
        raise UserError(f"{folder}: holds other prepared data: choose another folder, or remove this one")
    if manifest.skipped:
        first, limit = manifest.examples[0], inputs.max_bad_lines
        refuse_skipped(manifest.skipped, first, limit, inputs.unit)
        records = inputs.count_records(manifest)
        if records is not None:
            refuse_skipped_share(inputs.name, manifest.skipped, records, first, limit)
    return manifest


def _make(
    partial: PartialFolder,
    inputs: BuildInputs,
    key: str,
    workers: int | None,
    progress: Callable[[BuildProgress], None],
    shard_tokens: int,
) -> None:
    for name, text in inputs.files().items():
        _write_durably(partial.path / name, text)
    with Workers(1, inputs.prepare) as pool:
        vocabulary, end = pool.prepared
        if inputs.held_back is not None:
            rows = np.load(inputs.held_back.table)[inputs.held_back.first :].tolist()
            blocks = [(0, FileBlock(*row)) for row in rows]
        else:
            listed = [pool.call(list_blocks, spec, inputs.block_bytes) for spec in inputs.specs]
            blocks = [(number, block) for number, found in enumerate(listed) for block in found]
        left = blocks[partial.blocks :]
        pool.grow(min(workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0))), len(left)))
        results = _counted(pool.map(inputs.encode, left), left, partial, blocks, progress)
        _write(partial, inputs, _selected(results, inputs.held_back), token_type(vocabulary), end, shard_tokens)
    manifest = partial.manifest(inputs, key, vocabulary, end)
    inputs.refuse_empty(manifest)
    partial.publish(manifest)


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
    tokens, documents, skipped = (partial.total(name) for name in ("tokens", "documents", "skipped"))
    resumed = tokens
    progress(BuildProgress(done, total, documents, tokens, skipped, resumed))
    for (_, block), encoded in zip(left, results, strict=True):
        done += block.size
        tokens += sum(len(part.tokens) for part in encoded)
        skipped += sum(len(part.skipped) for part in encoded)
        documents += sum(len(np.unique(part.documents[part.lengths > 0])) for part in encoded)
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
            kept = [block.select(held_back(block.documents, held.fraction)) for block in encoded]
        gathered += sum(len(block.tokens) for block in kept)
        yield kept
        if gathered >= held.enough:
            return


def _write(
    partial: PartialFolder,
    inputs: BuildInputs,
    results: Iterator[list[TokenBlock]],
    dtype: np.dtype[Any],
    end: int,
    shard_tokens: int,
) -> None:
    """Write results to files of tokens, as many as it takes."""
    done, skipped = partial.blocks, partial.total("skipped")
    writer = partial.writer(dtype, end)
    used = False
    for encoded in results:
        used = True
        done += 1
        for block in encoded:
            for one in block.skipped:
                skipped += 1
                refuse_skipped(skipped, one, inputs.max_bad_lines, inputs.unit)
            writer.add(block)
        if writer.tokens >= shard_tokens:
            partial.take(writer, done)
            writer, used = partial.writer(dtype, end), False
    if used:
        partial.take(writer, done)
