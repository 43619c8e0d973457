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
import logging
import os
import shutil
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from trainium_contract.trainer.data import BosToken
from trainium_trainer.data.cache import hold_lock
from trainium_trainer.data.prepared.reader import (
    INDEX_FILE,
    MANIFEST_FILE,
    PreparedManifest,
    Shard,
    is_prepared,
    read_manifest,
    to_arrow,
)
from trainium_trainer.data.prepared.shard_writer import MAX_EXAMPLES, ShardWriter
from trainium_trainer.data.sources.documents import refuse_skipped, refuse_skipped_share
from trainium_trainer.data.tokens.encoding import TokenBlock, choose_token_type, list_blocks
from trainium_trainer.data.tokens.special_tokens import NO_BOS_PREFIX, BosPrefix
from trainium_trainer.data.tokens.tokenizer import hash_tokenizer
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from trainium_contract.trainer.data import DataConfig
    from trainium_trainer.data.sources.documents import DocumentSource, FileBlock
    from trainium_trainer.data.sources.resolve import SourceSpec


_PLAN = "plan.json"
_MAX_WORKERS = 16
_SECONDS_BETWEEN_LINES = 10.0
_log = logging.getLogger("trainium.data")


def _write_durably(path: Path, text: str) -> None:
    """Write a small file atomically and durably."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


class BlockEncoder(Protocol):
    """Encodes blocks of sources in a worker process."""

    @property
    def vocabulary(self) -> int:
        """The number of entries of the tokenizer."""
        ...

    @property
    def end(self) -> int:
        """The token that ends documents; of examples the padding token."""
        ...

    def encode_block(self, source: DocumentSource, block: FileBlock) -> list[TokenBlock]:
        """Return the tokens of a block. Raises UserError or StorageError."""
        ...


class BuildInputs(ABC):
    """Everything on which a prepared folder depends; a copy goes to each worker process."""

    specs: tuple[SourceSpec, ...]
    tokenizer: Path
    max_bad_lines: int | None
    bos_prefix: BosPrefix = NO_BOS_PREFIX
    block_bytes: ClassVar[int]
    """The approximate bytes of a block."""
    shard_tokens: ClassVar[int]
    """Tokens after which a file is finished."""
    unit: ClassVar[str] = "lines"
    """The name of the skipped units, for messages."""

    @property
    def name(self) -> str:
        """The sources, for messages."""
        return ", ".join(spec.name for spec in self.specs)

    @abstractmethod
    def compute_key(self, cache_folder: Path | None) -> str:
        """Return a digest of everything on which the folder depends. Raises UserError or StorageError."""

    @abstractmethod
    def create_encoder(self) -> BlockEncoder:
        """Create the encoder of this process. Raises UserError."""

    @abstractmethod
    def refuse_empty(self, manifest: PreparedManifest) -> None:
        """Raise UserError if there is no training data."""

    @abstractmethod
    def count_records(self, manifest: PreparedManifest) -> int | None:
        """Return the number of records that were read, with skipped ones; None if lines are not records."""

    def list_blocks(self, pool: Workers) -> list[tuple[int, FileBlock]]:
        """Return the blocks to encode, each with the index of its source."""
        listed = [pool.call(list_blocks, spec, self.block_bytes) for spec in self.specs]
        return [(number, block) for number, blocks in enumerate(listed) for block in blocks]

    def select(self, results: Iterator[list[TokenBlock]]) -> Iterator[list[TokenBlock]]:
        """Yield what is kept of the results; blocks after its end are not encoded."""
        return results

    def list_files(self) -> Mapping[str, str]:
        """Return the other files of the folder, text by name."""
        return {}


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
        while (record := self._build_record_path(len(self.shards))).exists():
            self.shards.append(Shard.from_json(json.loads(record.read_text(encoding="utf-8"))))

    def _build_record_path(self, number: int) -> Path:
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
        for name, text in inputs.list_files().items():
            _write_durably(self.path / name, text)
        with Workers(1, (initialize_worker, (inputs,))) as pool:
            vocabulary, end = pool.prepared
            blocks = inputs.list_blocks(pool)
            remaining = blocks[self.finished_blocks :]
            pool.grow(min(workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0))), len(remaining)))
            results = self._report_progress(pool.map(encode_block, remaining), remaining, blocks, progress)
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
        _write_durably(self._build_record_path(len(self.shards)), json.dumps(asdict(shard)))
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
            examples=tuple(example for shard in self.shards for example in shard.examples)[:MAX_EXAMPLES],
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


def build_in_cache(
    config: DataConfig,
    kind: str,
    inputs: BuildInputs,
    cache: Path,
    progress: Callable[[BuildProgress], None] | None = None,
) -> Path:
    """Build a folder, unless the cache has it, and warn about what was skipped. Raises UserError or StorageError."""
    key = inputs.compute_key(cache)
    folder = cache / f"{kind}-{key[:32]}"
    manifest = build(folder, inputs, key, workers=config.workers, progress=progress or _ProgressLog(inputs.name))
    if manifest.skipped:
        first = manifest.examples[0]
        _log.warning("data.source %s: skipped %d %s, the first: %s", inputs.name, manifest.skipped, inputs.unit, first)
    return folder


class _ProgressLog:
    """Logs the progress of a long build at intervals."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = time.monotonic()

    def __call__(self, progress: BuildProgress) -> None:
        """Log the progress, unless it was logged recently."""
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            share = 100 * progress.bytes / max(1, progress.total_bytes)
            _log.info("tokenizing %s: %.0f %%, %d tokens", self._name, share, progress.tokens)


# ---- functions that a worker process calls by reference -------------------------------------------------------------

_worker: dict[str, Any] = {}


def initialize_worker(inputs: BuildInputs) -> tuple[int, int]:
    """Prepare this process; return the size of the vocabulary and the token at the end of documents."""
    encoder = inputs.create_encoder()
    _worker.update(inputs=inputs, encoder=encoder)
    return encoder.vocabulary, encoder.end


def encode_block(source: int, block: FileBlock) -> list[TokenBlock]:
    """Return the tokens of a block of the source with this index."""
    encoder: BlockEncoder = _worker["encoder"]
    return encoder.encode_block(_worker["inputs"].specs[source].source, block)
