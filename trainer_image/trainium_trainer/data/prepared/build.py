"""Build a prepared folder by worker processes: of text for `prepare-data` and the cache, of examples for the cache.

Guarantees:
- The folder is a pure function of sources and recipe, at any number of processes and interruptions.
- It is built once, even if several processes need it at the same time.
- Everything is written into `<folder>.partial`, and one rename publishes it with the manifest.
- After each finished file of tokens, a progress record stores the position in the source. A partial folder of other
  inputs is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_contract.trainer.data import BosToken
from trainium_trainer.data.prepared.reader import (
    INDEX_FILE,
    MANIFEST_FILE,
    PreparedManifest,
    Shard,
    is_prepared,
    read_manifest,
    to_arrow,
)
from trainium_trainer.data.sources.documents import FileBlock, refuse_skipped, refuse_skipped_share
from trainium_trainer.data.sources.files import hold_lock
from trainium_trainer.data.tokens.encoding import RecordCounts, TokenBlock, choose_token_type, list_blocks
from trainium_trainer.data.tokens.tokenizer import NO_BOS_PREFIX, BosPrefix, hash_tokenizer
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from trainium_trainer.data.sources.resolve import SourceSpec


_BATCH_TOKENS = 1 << 20
_EXAMPLES = 5
_PLAN = "plan.json"
_MAX_WORKERS = 16


def _write_durably(path: Path, text: str) -> None:
    """Write a small file atomically and durably."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInputs:
    """The inputs of a prepared folder and the functions that encode them."""

    name: str
    """The sources, for messages."""
    specs: tuple[SourceSpec, ...]
    tokenizer: Path
    max_bad_lines: int | None
    prepare: tuple[Callable[..., tuple[int, int]], tuple[Any, ...]]
    """Called in each process; returns the vocabulary's size and the end-of-document or padding token."""
    encode: Callable[[int, FileBlock], list[TokenBlock]]
    """Called in each process with the index of a source and one of its blocks."""
    refuse_empty: Callable[[PreparedManifest], None]
    """Raises UserError if there is no training data."""
    count_records: Callable[[PreparedManifest], int | None]
    """Returns the number of records that were read, with skipped ones; None if lines are not records."""
    block_bytes: int
    shard_tokens: int = 64 << 20
    """Tokens after which a file is finished."""
    unit: str = "lines"
    """The name of the skipped units, for messages."""
    files: Callable[[], Mapping[str, str]] = dict
    """Returns the other files of the folder, text by name."""
    bos_prefix: BosPrefix = NO_BOS_PREFIX
    blocks: Callable[[], list[FileBlock]] | None = None
    """Returns the blocks of the only source; None: all blocks of all sources."""
    select: Callable[[Iterator[list[TokenBlock]]], Iterator[list[TokenBlock]]] = iter
    """Yields what is kept of the results; blocks after its end are not encoded."""


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Progress of a build."""

    bytes: int
    total_bytes: int
    documents: int
    tokens: int
    skipped: int
    resumed_tokens: int
    """The tokens of an interrupted run."""


class PartialFolder:
    """A prepared folder during its build."""

    def __init__(self, folder: Path, inputs: BuildInputs, key: str) -> None:
        """Open the folder of an interrupted build of the same inputs, else an empty one.

        Raises UserError if another folder has that name.
        """
        self.folder = folder
        self._inputs, self._key = inputs, key
        self.path = folder.with_name(folder.name + ".partial")
        plan = self.path / _PLAN
        if not plan.exists() and self.path.exists() and {file.name for file in self.path.iterdir()} - {f"{_PLAN}.tmp"}:
            raise UserError(f"{self.path}: is there already and is no unfinished prepared data: choose another folder")
        if not plan.exists() or json.loads(plan.read_text(encoding="utf-8")) != key:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
            _write_durably(plan, json.dumps(key))
        self.shards: list[Shard] = []
        while (note := self._read_progress(len(self.shards))).exists():
            self.shards.append(Shard.from_json(json.loads(note.read_text(encoding="utf-8"))))

    def _read_progress(self, number: int) -> Path:
        return self.path / f"tokens-{number:05d}.json"

    @property
    def finished_blocks(self) -> int:
        """The number of finished blocks of the source."""
        return self.shards[-1].blocks if self.shards else 0

    def sum_field(self, name: str) -> int:
        """Return the sum of a field of the finished files."""
        return sum(getattr(shard, name) for shard in self.shards)

    def build(self, workers: int | None, progress: Callable[[BuildProgress], None]) -> None:
        """Build what is missing, and rename the folder. Raises UserError, StorageError, WorkerError, OSError."""
        inputs = self._inputs
        for name, text in inputs.files().items():
            _write_durably(self.path / name, text)
        with Workers(1, inputs.prepare) as pool:
            vocabulary, end = pool.prepared
            if inputs.blocks is not None:
                blocks = [(0, block) for block in inputs.blocks()]
            else:
                listed = [pool.call(list_blocks, spec, inputs.block_bytes) for spec in inputs.specs]
                blocks = [(number, block) for number, blocks_of_file in enumerate(listed) for block in blocks_of_file]
            remaining = blocks[self.finished_blocks :]
            pool.grow(min(workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0))), len(remaining)))
            results = self._report_progress(pool.map(inputs.encode, remaining), remaining, blocks, progress)
            self._write(inputs.select(results), choose_token_type(vocabulary), end)
        manifest = self._create_manifest(vocabulary, end)
        inputs.refuse_empty(manifest)
        self._publish(manifest)

    def _report_progress(
        self,
        results: Iterator[list[TokenBlock]],
        remaining: list[tuple[int, FileBlock]],
        blocks: list[tuple[int, FileBlock]],
        progress: Callable[[BuildProgress], None],
    ) -> Iterator[list[TokenBlock]]:
        """Yield results and report progress."""
        total = sum(block.size for _, block in blocks)
        done = total - sum(block.size for _, block in remaining)
        tokens, documents, skipped = (self.sum_field(name) for name in ("tokens", "documents", "skipped"))
        resumed = tokens
        progress(BuildProgress(done, total, documents, tokens, skipped, resumed))
        for (_, block), encoded in zip(remaining, results, strict=True):
            done += block.size
            tokens += sum(len(part.tokens) for part in encoded)
            skipped += sum(len(part.skipped) for part in encoded)
            documents += sum(len(np.unique(part.documents[part.lengths > 0])) for part in encoded)
            yield encoded
            progress(BuildProgress(done, total, documents, tokens, skipped, resumed))

    def _write(self, results: Iterator[list[TokenBlock]], dtype: np.dtype[Any], end: int) -> None:
        """Write results to as many files of tokens as needed."""
        done, skipped, inputs = self.finished_blocks, self.sum_field("skipped"), self._inputs
        writer: ShardWriter | None = None
        for encoded in results:
            if writer is None:
                writer = ShardWriter(self.path / f"tokens-{len(self.shards):05d}.arrow", dtype, end)
            done += 1
            for block in encoded:
                for record in block.skipped:
                    skipped += 1
                    refuse_skipped(skipped, record, inputs.max_bad_lines, inputs.unit)
                writer.add(block)
            if writer.tokens >= inputs.shard_tokens:
                self._record_shard(writer, done)
                writer = None
        if writer is not None:
            self._record_shard(writer, done)

    def _record_shard(self, writer: ShardWriter, blocks: int) -> None:
        """Record a finished file, which a resumed build reuses."""
        shard = writer.finish(blocks)
        _write_durably(self._read_progress(len(self.shards)), json.dumps(asdict(shard)))
        self.shards.append(shard)

    def _create_manifest(self, vocabulary: int, end: int) -> PreparedManifest:
        """Return the manifest of the finished files."""
        digest, inputs = hashlib.sha256("".join(shard.digest for shard in self.shards).encode()), self._inputs
        return PreparedManifest(
            key=self._key,
            identity=digest.hexdigest(),
            sources=tuple(spec.name for spec in inputs.specs),
            tokens=self.sum_field("tokens"),
            documents=self.sum_field("documents"),
            skipped=self.sum_field("skipped"),
            examples=tuple(example for shard in self.shards for example in shard.examples)[:_EXAMPLES],
            vocabulary=vocabulary,
            dtype=choose_token_type(vocabulary).name,
            end_of_document=end,
            tokenizer=hash_tokenizer(inputs.tokenizer),
            shards=tuple(self.shards),
            bos_tokens=inputs.bos_prefix.tokens if inputs.bos_prefix.rule is BosToken.ALWAYS else (),
        )

    def _publish(self, manifest: PreparedManifest) -> None:
        """Write index and manifest, and rename the folder."""
        self._write_index()
        _write_durably(self.path / MANIFEST_FILE, manifest.to_json())
        self.path.rename(self.folder)
        for note in (*self.folder.glob("tokens-*.json"), self.folder / _PLAN):  # last: a resumed build needs them
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
        table = pa.table({name: to_arrow(np.array(values, np.int64)) for name, values in rows.items()})
        temporary = self.path / "index.tmp"
        with temporary.open("wb") as stream:
            with pa.ipc.new_file(stream, table.schema) as writer:
                writer.write_table(table)
            os.fsync(stream.fileno())
        temporary.replace(self.path / INDEX_FILE)


@dataclass(slots=True)
class ShardWriter:
    """Writes one file of tokens."""

    path: Path
    dtype: np.dtype[Any]
    end: int
    tokens: int = 0
    documents: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    _counts: RecordCounts | None = None
    _largest: int = 0
    _digests: dict[str, Any] = field(default_factory=dict)
    _waiting: list[TokenBlock] = field(default_factory=list)
    _waiting_tokens: int = 0
    _stream: Any = None
    _file: Any = None

    def add(self, block: TokenBlock) -> None:
        """Append a block; small blocks are combined."""
        self.skipped += len(block.skipped)
        space = _EXAMPLES - len(self.examples)
        self.examples += [skipped.format_message() for skipped in block.skipped[:space]]
        if block.counts is not None:
            self._counts = self._counts or RecordCounts()
            self._counts.add(block.counts)
        if not len(block.lengths):
            return
        ends = block.tokens == self.end if block.examples is None else block.lengths > 0
        self.tokens += len(block.tokens)
        self.documents += int(ends.sum())
        self._largest = max(self._largest, int(block.tokens.max(initial=0)))
        hashed = {"tokens": block.tokens}
        if block.examples is not None:
            nonempty = block.lengths > 0
            rows = np.stack([block.lengths, block.examples.answers, block.documents.view(np.int64)], axis=1)[nonempty]
            hashed |= {"trained": block.examples.loss_mask, "rows": rows}
        for name, values in hashed.items():
            self._digests.setdefault(name, hashlib.sha256()).update(values.tobytes())
        self._waiting.append(block)
        self._waiting_tokens += len(block.tokens)
        if self._waiting_tokens >= _BATCH_TOKENS:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        lengths = np.concatenate([block.lengths for block in self._waiting])
        offsets = to_arrow(np.concatenate(([0], np.cumsum(lengths))))

        def lists(values: list[Any]) -> Any:
            return pa.LargeListArray.from_arrays(offsets, to_arrow(np.concatenate(values)))

        columns = {
            "tokens": lists([block.tokens for block in self._waiting]),
            "document": to_arrow(np.concatenate([block.documents for block in self._waiting])),
        }
        examples = [block.examples for block in self._waiting if block.examples is not None]
        if examples:
            columns["trained"] = lists([part.loss_mask.view(np.uint8) for part in examples])
            columns["answer"] = to_arrow(np.concatenate([part.answers for part in examples]))
            columns["before"] = to_arrow(np.concatenate([part.original_lengths for part in examples]))
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
        if self._file is None:  # only skipped lines
            kinds = {"tokens": pa.large_list(pa.from_numpy_dtype(self.dtype)), "document": pa.uint64()}
            self._open(pa.schema(kinds))
        self._file.close()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self.path.with_suffix(".tmp").replace(self.path)
        digests = [digest.hexdigest() for digest in self._digests.values()] or [hashlib.sha256().hexdigest()]
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


def build(
    folder: Path,
    inputs: BuildInputs,
    key: str,
    *,
    workers: int | None = None,
    progress: Callable[[BuildProgress], None] = lambda _: None,
) -> PreparedManifest:
    """Build `folder` unless it exists. Raises UserError, StorageError, WorkerError, OSError."""
    if not is_prepared(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_name(f".{folder.name}.lock")):
            if not is_prepared(folder):
                if folder.exists():
                    raise UserError(f"{folder}: is there already and is not prepared data: choose another folder")
                partial = PartialFolder(folder, inputs, key)
                try:
                    partial.build(workers, progress)
                except UserError:
                    if not partial.sum_field("documents"):  # else a later build continues it
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
