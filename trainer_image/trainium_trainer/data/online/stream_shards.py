"""Tokenize text during training: each row of the global batch is a separate stream, a stream shard.

A source is a number of blocks, shuffled again each epoch. Shard l of n reads blocks l, l + n, l + 2n, ... of that
endless order, joins their tokens and cuts them into samples. With several sources a shard has such a stream for each,
and a mixture chooses the next one.

Guarantees:
- The contents of a shard are a pure function of data, seed, number of shards and step, so a rank needs only its shards,
  and any rank can continue them.
- Each epoch of a source has each of its blocks once, at any number of ranks.
- A block ends with an end-of-document token.
- Nothing is dropped between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.batches.order import Mixture, find_shuffled_item
from trainium_trainer.data.prepared.reader import PreparedData, divide_file_checks
from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, SkippedRecord
from trainium_trainer.data.tokens.encoding import DocumentEncoder, select_held_back
from trainium_trainer.data.tokens.special_tokens import NO_BOS_PREFIX, BosPrefix
from trainium_trainer.exits import UserError
from trainium_worker.data import Permutation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trainium_trainer.data.sources.resolve import SourceSpec


@dataclass(frozen=True, slots=True)
class ShardSource:
    """A source of the shards, in a form that is sent to worker processes."""

    spec: SourceSpec
    prepared: str | None = None
    """The folder of prepared data."""
    blocks_file: str | None = None
    """The file with the blocks of text: rows of file, start, end, size."""
    blocks: int = 0
    """The number of blocks for training; further ones are held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Everything on which the shards depend."""

    sources: tuple[ShardSource, ...]
    tokenizer: str
    shards: int
    sequence_length: int
    seed: int
    held_back: float | None
    """The fraction of the documents that are held back by their hash."""
    bos_prefix: BosPrefix = NO_BOS_PREFIX


@dataclass(frozen=True, slots=True)
class StreamedBlock:
    """The tokens of a block without held-back documents, and the problems of its records."""

    tokens: NDArray[Any]
    skipped: tuple[SkippedRecord, ...] = ()
    """Lines that could not be used."""
    records: int = 0
    """The number of records, with skipped ones; 0 if documents are not records."""


@dataclass(slots=True)
class ShardSamples:
    """The samples of some shards for one step, and facts learned from the blocks read for them."""

    rows: list[NDArray[Any]] = field(default_factory=list)
    """Sequence length + 1 tokens for each shard."""
    counts: list[tuple[int, int, int]] = field(default_factory=list)
    """Source, block and number of tokens of the tokenized blocks."""
    consumed: list[tuple[int, StreamedBlock]] = field(default_factory=list)
    """Source and contents, without tokens, of the blocks whose tokens are used."""

    def read_block(self, stream: _Stream, block: int, *, is_consumed: bool) -> NDArray[Any]:
        """Return the tokens of a block of a stream."""
        contents = stream.blocks.read(block)
        if isinstance(stream.blocks, TextBlocks):
            self.counts.append((stream.source, block, len(contents.tokens)))
        if is_consumed:
            self.consumed.append((stream.source, replace(contents, tokens=contents.tokens[:0])))
        return contents.tokens


class PreparedBlocks:
    """The record batches of prepared data."""

    def __init__(self, folder: str, blocks: int, held_back: float | None) -> None:
        with divide_file_checks(1, 1):  # the files were checked when the blocks were listed
            self._prepared = PreparedData(Path(folder))
        self._blocks = blocks
        self._held_back = held_back

    def __len__(self) -> int:
        """Return the number of record batches for training."""
        return self._blocks

    def count(self, block: int) -> int | None:
        """Return the number of tokens of a block, from the index unless documents of the batch are held back."""
        return int(self._prepared.batch_tokens[block]) if self._held_back is None else len(self.read(block).tokens)

    def read(self, block: int) -> StreamedBlock:
        """Return the tokens of a block without those of held-back documents."""
        values, starts, documents = self._prepared.batch(block)
        if self._held_back is not None:
            values = values[np.repeat(~select_held_back(documents, self._held_back), np.diff(starts))]
        return StreamedBlock(values)


class TextBlocks:
    """Blocks of text."""

    def __init__(
        self, source: DocumentSource, table: NDArray[np.int64], encoder: DocumentEncoder, held_back: float | None
    ) -> None:
        self._source = source
        self._table = table
        self._encoder = encoder
        self._held_back = held_back
        self._counts: dict[int, int] = {}

    def add_counts(self, blocks: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Add the numbers of tokens that other runs or ranks have counted."""
        self._counts.update(zip(blocks.tolist(), tokens.tolist(), strict=True))

    def __len__(self) -> int:
        """Return the number of blocks for training."""
        return len(self._table)

    def count(self, block: int) -> int | None:
        """Return the number of tokens of a block; None if it has not been counted."""
        return self._counts.get(block)

    def read(self, block: int) -> StreamedBlock:
        """Tokenize a block. Raises UserError or StorageError."""
        parts = self._encoder.encode_block(self._source, FileBlock(*self._table[block].tolist()))
        encoded = [
            part.tokens
            if self._held_back is None
            else part.select(~select_held_back(part.documents, self._held_back)).tokens
            for part in parts
        ]
        tokens = np.concatenate(encoded) if encoded else np.empty(0, self._encoder.dtype)
        if len(tokens) and tokens[-1] != self._encoder.end:
            tokens = np.append(tokens, self._encoder.dtype.type(self._encoder.end))
        self._counts[block] = len(tokens)
        skipped = tuple(skipped for part in parts for skipped in part.skipped)
        documents = sum(int((part.tokens == self._encoder.end).sum()) for part in parts)
        return StreamedBlock(tokens, skipped, 0 if self._source.has_lines else documents + len(skipped))


Blocks = PreparedBlocks | TextBlocks


@dataclass(slots=True)
class _Stream:
    """The stream of one source in one shard."""

    source: int
    """The index of the source in the plan."""
    blocks: Blocks
    shard: int
    shards: int
    seed: int
    name: str
    _next: int = 0  # index of the next block of the shard
    _buffer: list[NDArray[Any]] = field(default_factory=list)
    _buffered: int = 0
    _empty: int = 0  # consecutive blocks without tokens

    def _find_next_block(self) -> int:
        return find_shuffled_item(self.shard + self._next * self.shards, len(self.blocks), self.seed)

    def seek(self, token: int, samples: ShardSamples) -> None:
        """Move the stream to a token, counted from the beginning of the run."""
        self._next, self._buffer, self._buffered = 0, [], 0
        while True:
            block = self._find_next_block()
            count = self.blocks.count(block)
            if count is None:
                count = len(samples.read_block(self, block, is_consumed=False))
            if count > token:
                break
            token -= count
            self._advance(count)
        self._fill(token + 1, samples)
        self._drop(token)

    def _advance(self, count: int) -> None:
        self._next += 1
        self._empty = 0 if count else self._empty + 1
        if self._empty > len(self.blocks):
            raise UserError(f"data.source {self.name}: holds no text to train on: give a source with text in it")

    def _fill(self, size: int, samples: ShardSamples) -> None:
        """Read blocks until the buffer has `size` tokens."""
        while self._buffered < size:
            tokens = samples.read_block(self, self._find_next_block(), is_consumed=True)
            self._advance(len(tokens))
            if len(tokens):
                self._buffer.append(tokens)
                self._buffered += len(tokens)

    def _drop(self, count: int) -> None:
        """Remove tokens from the front."""
        self._buffered -= count
        while count:
            first = self._buffer[0]
            dropped = min(count, len(first))
            if dropped == len(first):
                self._buffer.pop(0)
            else:
                self._buffer[0] = first[dropped:]
            count -= dropped

    def sample(self, length: int, samples: ShardSamples) -> NDArray[Any]:
        """Return the next `length` tokens and the first token of the next sample."""
        self._fill(length + 1, samples)
        parts, missing = [], length + 1
        for part in self._buffer:
            parts.append(part[:missing])
            missing -= len(parts[-1])
            if not missing:
                break
        tokens = parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
        self._drop(length)
        return tokens


class StreamShards:
    """Some of the shards, read step by step."""

    def __init__(self, plan: ShardPlan, shards: Sequence[int], blocks: Sequence[Blocks]) -> None:
        self._plan = plan
        self._step = -1
        weights = [source.spec.weight for source in plan.sources]
        self._mixtures = []
        self._streams: list[list[_Stream]] = []
        orders = [Permutation(plan.shards, plan.seed, number) for number in range(len(weights))]
        for shard in shards:
            # The phases spread the sources over the shards, so that each step has them in their shares too.
            phase = [(order[shard] + 0.5) / plan.shards for order in orders]
            self._mixtures.append(Mixture(weights, plan.seed, phase))
            self._streams.append(
                [
                    _Stream(number, of_source, shard, plan.shards, plan.seed + 7919 * number, source.spec.name)
                    for number, (source, of_source) in enumerate(zip(plan.sources, blocks, strict=True))
                ]
            )

    def read_rows(self, step: int) -> ShardSamples:
        """Return the samples of a step; fast for consecutive steps. Raises UserError or StorageError."""
        samples = ShardSamples()
        length = self._plan.sequence_length
        if step != self._step + 1 or self._step < 0:
            for mixture, streams in zip(self._mixtures, self._streams, strict=True):
                for source, stream in enumerate(streams):
                    stream.seek(mixture.count_before(step, source) * length, samples)
        self._step = step
        samples.rows = [
            streams[mixture[step][0]].sample(length, samples)
            for mixture, streams in zip(self._mixtures, self._streams, strict=True)
        ]
        return samples


# ---- functions that a tokenizing process calls by reference ---------------------------------------------------------

_worker: dict[str, Any] = {}


def initialize_shards(
    plan: ShardPlan, shards: Sequence[int], counts: Sequence[tuple[NDArray[Any], NDArray[Any]]]
) -> None:
    """Prepare this process for some shards; `counts` has each source's counted blocks and their numbers of tokens."""
    encoder = DocumentEncoder(Path(plan.tokenizer), plan.bos_prefix)
    blocks: list[Blocks] = []
    for source, (counted, tokens) in zip(plan.sources, counts, strict=True):
        if source.prepared is not None:
            blocks.append(PreparedBlocks(source.prepared, source.blocks, plan.held_back))
            continue
        assert source.blocks_file is not None
        table: NDArray[np.int64] = np.load(source.blocks_file, mmap_mode="r")[: source.blocks]
        text = TextBlocks(source.spec.source, table, encoder, plan.held_back)
        text.add_counts(counted, tokens)
        blocks.append(text)
    _worker["shards"] = StreamShards(plan, shards, blocks)


def read_shard_samples(step: int) -> ShardSamples:
    """Return the samples of a step."""
    shards: StreamShards = _worker["shards"]
    return shards.read_rows(step)
