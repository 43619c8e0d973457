"""Open text that is tokenized during training, and record the token counts of its blocks.

The counts are stored with the checkpoints, so that a resume need not count again. Each data-parallel rank appends to
its file, and all ranks read all files.

Guarantees:
- Only the text of the validation is tokenized here.
- The blocks of a source are listed once per machine, in a file that all its processes memory-map.
- The counts only cache a pure function: any of them may be missing, torn, duplicated or from another size of the job.
- An incomplete record is ignored.
- Nothing is written after the file is closed by any thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_contract.trainer.data import ValidationSplit
from trainium_trainer.data.batches.samples import SampleRules, TextSampleSource
from trainium_trainer.data.cache import create_once
from trainium_trainer.data.online.stream_shards import ShardPlan, ShardSource
from trainium_trainer.data.prepared.build import build_in_cache
from trainium_trainer.data.prepared.reader import DocumentSelection, PreparedData, PreparedManifest, TokenRange
from trainium_trainer.data.prepared.text_sources import TextInputs
from trainium_trainer.data.sources.documents import FileBlock
from trainium_trainer.data.tokens.encoding import TokenBlock, list_blocks, select_held_back
from trainium_trainer.data.tokens.tokenizer import end_facts, hash_tokenizer
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from trainium_trainer.data.prepared.text_sources import TextSource, TextSources


_log = logging.getLogger("trainium.data")
_SMALLEST_BLOCK, _LARGEST_BLOCK = 64 << 10, 4 << 20
_BLOCKS_PER_SHARD = 16
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Streams:
    """The training text that is tokenized during training."""

    plan: ShardPlan
    rules: SampleRules
    workers: int
    max_bad_lines: int | None
    identity: str
    """The digest of everything on which the tokens of a block depend."""

    @property
    def name(self) -> str:
        """The sources, for messages."""
        return ", ".join(source.spec.name for source in self.plan.sources)

    @property
    def epoch_samples(self) -> None:
        """None, because samples are not counted ahead."""
        return

    def list_numbers(self, position: int, count: int) -> list[int]:
        """Return the numbers of samples position .. position + count - 1, which are their positions."""
        return list(range(position, position + count))


def open_streams(
    texts: TextSources, rules: SampleRules, global_size: int
) -> tuple[Streams, list[TextSampleSource], dict[str, Any]]:
    """Return the streams, the held-back parts of the sources, and the facts that determine the samples.

    Raises UserError or StorageError.
    """
    config, tokenizer, validation = texts.config, texts.tokenizer, texts.config.validation
    fraction = validation.fraction if validation is not None else None
    by_hash = validation is not None and validation.split is ValidationSplit.DOCUMENT_HASH
    sources, sample_sources, identities = [], [], []
    for text_source in texts.sources:
        source, identity = _open_shard_source(text_source, global_size, texts.cache)
        identities.append([identity, source.blocks])
        if validation is not None and fraction is not None:
            training_blocks = source.blocks if by_hash else int(source.blocks * (1 - fraction))
            if not training_blocks or (training_blocks == source.blocks and not by_hash):
                raise UserError(
                    f"data.source {text_source.spec.name}: is too small to hold back its end while it is tokenized "
                    "online: set data.tokenization to Ahead"
                )
            max_tokens = (validation.samples + 1) * config.sequence_length + 1
            sample_sources.append(
                _open_held_back(texts, text_source, source, training_blocks, fraction if by_hash else None, max_tokens)
            )
            source = replace(source, blocks=training_blocks)
        sources.append(source)
    plan = ShardPlan(
        sources=tuple(sources),
        tokenizer=str(tokenizer),
        shards=global_size,
        sequence_length=config.sequence_length,
        seed=config.seed,
        held_back=fraction if by_hash else None,
        bos_prefix=texts.bos_prefix,
    )
    facts: dict[str, Any] = {
        "blocks": identities,
        "heldBack": plan.held_back,
        "tokenizer": hash_tokenizer(tokenizer),
        "format": _FORMAT,
    }
    facts |= end_facts(tokenizer)
    if begins := texts.bos_prefix.list_settings():
        facts["bos"] = begins
    identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    streams = Streams(plan, rules, config.workers or 1, config.max_bad_lines, identity)
    return streams, sample_sources, {"online": facts, "shards": global_size}


def _open_shard_source(text_source: TextSource, shards: int, cache: Path) -> tuple[ShardSource, str]:
    """Return a source of the shards and its identity."""
    if text_source.prepared is not None:
        prepared = PreparedData(text_source.prepared)
        source = ShardSource(text_source.spec, str(text_source.prepared), None, len(prepared.batch_tokens))
        return source, prepared.manifest.identity
    text = text_source.spec.source
    target = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, text.size // (_BLOCKS_PER_SHARD * shards)))
    identity = f"{text.compute_identity(cache)}-{target}"
    blocks_file = _list_blocks_once(text_source, identity, target, cache)
    blocks = len(np.load(blocks_file, mmap_mode="r"))
    if not blocks:
        raise UserError(f"data.source {text_source.spec.name}: holds no text: give a source with text in it")
    return ShardSource(text_source.spec, None, str(blocks_file), blocks), identity


def _list_blocks_once(text_source: TextSource, identity: str, target: int, cache: Path) -> Path:
    """Return the file with the blocks of a text."""
    file = cache / f"blocks-{hashlib.sha256(f'{_FORMAT}-{identity}'.encode()).hexdigest()[:32]}.npy"

    def create() -> None:
        with Workers(1) as workers:
            blocks = workers.call(list_blocks, text_source.spec, target)
        rows = [astuple(block) for block in blocks]
        temporary = file.with_suffix(".tmp")
        with temporary.open("wb") as stream:
            np.save(stream, np.array(rows, np.int64))
        temporary.replace(file)

    return create_once(file, create)


def _open_held_back(
    texts: TextSources,
    text_source: TextSource,
    source: ShardSource,
    training_blocks: int,
    fraction: float | None,
    max_tokens: int,
) -> TextSampleSource:
    """Return the held-back part of a source, or the beginning of that part."""
    name = text_source.spec.name
    if text_source.prepared is not None:
        prepared = PreparedData(text_source.prepared)
        if fraction is not None:
            return TextSampleSource(
                name, DocumentSelection(prepared, fraction, validation=True, cache_folder=texts.cache)
            )
        return TextSampleSource(name, TokenRange(prepared, int(prepared.ends[training_blocks - 1]), prepared.tokens))
    assert source.blocks_file is not None
    inputs = HeldBackInputs(
        (text_source.spec,),
        texts.tokenizer,
        texts.config.max_bad_lines,
        texts.bos_prefix,
        fraction=fraction,
        max_tokens=max_tokens,
        blocks_file=source.blocks_file,
        first=0 if fraction is not None else training_blocks,
    )
    return TextSampleSource(name, PreparedData(build_in_cache(texts.config, "tokens", inputs, texts.cache)))


@dataclass(frozen=True, kw_only=True)
class HeldBackInputs(TextInputs):
    """The held-back part of a text, limited to the needed tokens."""

    fraction: float | None
    """The fraction of the documents, by their hash; None: all documents of the blocks."""
    max_tokens: int
    """The number of tokens after which no further block is read."""
    blocks_file: str
    """The file with the source's blocks."""
    first: int
    """The first block to read."""

    def list_selection(self) -> list[Any]:
        """See `TextInputs.list_selection`."""
        return [[self.fraction, self.max_tokens, self.first, Path(self.blocks_file).name]]

    def list_blocks(self, pool: Workers) -> list[tuple[int, FileBlock]]:  # noqa: ARG002 - as `BuildInputs` has it
        """Return the blocks to read."""
        return [(0, FileBlock(*row)) for row in np.load(self.blocks_file)[self.first :].tolist()]

    def select(self, results: Iterator[list[TokenBlock]]) -> Iterator[list[TokenBlock]]:
        """Yield the held-back documents of encoded blocks until there are enough tokens."""
        tokens = 0
        for encoded in results:
            selected = encoded
            if self.fraction is not None:
                selected = [block.select(select_held_back(block.documents, self.fraction)) for block in encoded]
            tokens += sum(len(block.tokens) for block in selected)
            yield selected
            if tokens >= self.max_tokens:
                return

    def refuse_empty(self, manifest: PreparedManifest) -> None:
        """Accept an empty part."""

    def count_records(self, manifest: PreparedManifest) -> None:  # noqa: ARG002 - as `BuildInputs` has it
        """Return None, because only a part of the records is read."""
        return


# ---- the token counts of blocks --------------------------------------------------------------------------------------

_RECORD = np.dtype([("source", "<u4"), ("block", "<u4"), ("count", "<u4"), ("check", "<u4")])
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class BlockCounts:
    """The recorded token counts of the blocks of a run's data."""

    def __init__(self, folder: Path | None, identity: str, rank: int | None) -> None:
        """Open the counts; `rank` is None for a process that only reads; without a folder nothing is recorded."""
        self._folder = folder
        self._prefix = f"blocks-{identity[:16]}-"
        self._lock = threading.Lock()
        """The run may close the file while the thread that prepares batches writes, and its descriptor may be reused.
        """
        self._descriptor: int | None = None
        if folder is not None and rank is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{self._prefix}{rank}.idx"
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.ftruncate(
                    self._descriptor, os.fstat(self._descriptor).st_size // _RECORD.itemsize * _RECORD.itemsize
                )
            except OSError as error:
                _log.warning("%s: block counts are not remembered (%s)", folder, error.strerror)

    def group_by_source(self, sources: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return the counted blocks of each source, and their numbers of tokens."""
        parts = [_read(path) for path in self._folder.glob(f"{self._prefix}*.idx")] if self._folder else []
        records = np.concatenate(parts) if parts else np.empty(0, _RECORD)
        return [
            (records["block"][of_source], records["count"][of_source])
            for of_source in (records["source"] == source for source in range(sources))
        ]

    def add(self, counts: Sequence[tuple[int, int, int]]) -> None:
        """Record source, block and count; stop after the first failed write."""
        if not counts:
            return
        records = np.zeros(len(counts), _RECORD)
        for name, column in zip(("source", "block", "count"), zip(*counts, strict=True), strict=True):
            records[name] = column
        records["check"] = _check(records)
        with self._lock:
            if self._descriptor is None:
                return
            try:
                os.write(self._descriptor, records.tobytes())
            except OSError as error:
                _log.warning("block counts are not remembered any more (%s)", error.strerror)
                self._close()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read(path: Path) -> NDArray[Any]:
    try:
        data = path.read_bytes()
    except OSError:
        return np.empty(0, _RECORD)
    records = np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    intact: NDArray[Any] = records[records["check"] == _check(records)]
    return intact


def _check(records: NDArray[Any]) -> NDArray[np.uint32]:
    mixed = np.zeros(len(records), np.uint64)
    for name, factor in zip(("source", "block", "count"), _FACTORS, strict=True):
        mixed += (records[name].astype(np.uint64) + 1) * np.uint64(factor)
    return (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
