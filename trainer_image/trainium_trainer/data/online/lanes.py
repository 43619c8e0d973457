"""Tokenize text while training: each row of the global batch is a separate stream, a lane.

A source is a number of blocks, shuffled again each epoch. Lane l of n takes blocks l, l + n, l + 2n, ... of that
endless order, joins their tokens and cuts them into samples. With several sources a lane has such a stream for each,
and a mixture that chooses the next.

Guarantees:
- What a lane holds is a pure function of data, seed, number of lanes and step, so a rank needs only its own lanes, and
  any rank may continue with them.
- Each epoch of a source has each of its blocks once, whatever the ranks.
- A block ends with an end-of-document token.
- Nothing is dropped between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.batches.order import Mixture, Permutation, shuffled
from trainium_trainer.data.prepared.prepared import Prepared, watching
from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Skipped
from trainium_trainer.data.tokens.encoding import DocumentEncoder, held_back
from trainium_trainer.data.tokens.tokenizer import AS_IT_IS, BosPrefix
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trainium_trainer.data.sources.resolve import SourceSpec


@dataclass(frozen=True, slots=True)
class LaneSource:
    """A source of the lanes, as it travels to a process."""

    spec: SourceSpec
    weight: float
    prepared: str | None = None
    """The folder of data that are tokens already."""
    table: str | None = None
    """A file with the blocks of text: rows of file, start, end, size."""
    blocks: int = 0
    """Number of blocks that are trained on; further ones are held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """All that the lanes depend on."""

    sources: tuple[LaneSource, ...]
    tokenizer: str
    lanes: int
    sequence_length: int
    seed: int
    held_back: float | None
    """Share of the documents that are held back by their hash."""
    beginning: BosPrefix = AS_IT_IS


@dataclass(frozen=True, slots=True)
class BlockTokens:
    """The contents of a block."""

    tokens: NDArray[Any]
    skipped: tuple[Skipped, ...] = ()
    """Lines that could not be used."""
    records: int = 0
    """With those that were skipped; 0 where documents are no records."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The samples of some lanes for one step, and what became known on the way."""

    rows: list[NDArray[Any]]
    """For each lane sequence length + 1 tokens."""
    counts: list[tuple[int, int, int]]
    """Source, block and tokens of blocks that were tokenised."""
    used: list[tuple[int, BlockTokens]]
    """Source and contents, without tokens, of blocks whose tokens are used."""


class PreparedBlocks:
    """The record batches of prepared data."""

    def __init__(self, folder: str, blocks: int, held: float | None) -> None:
        with watching(1, 1):  # the process that lists the blocks has looked at every file, or one beside it
            self._prepared = Prepared(Path(folder))
        self._blocks = blocks
        self._held = held

    def __len__(self) -> int:
        """Record batches that are trained on."""
        return self._blocks

    def count(self, block: int) -> int | None:
        """Return the tokens of a block: from the index, unless documents of the batch are held back."""
        return int(self._prepared.batch_tokens[block]) if self._held is None else len(self.read(block).tokens)

    def read(self, block: int) -> BlockTokens:
        """Return the tokens as they lie in the file, or those that are kept."""
        values, starts, documents = self._prepared.batch(block)
        if self._held is not None:
            values = values[np.repeat(~held_back(documents, self._held), np.diff(starts))]
        return BlockTokens(values)


class TextBlocks:
    """Blocks of text."""

    def __init__(
        self, source: DocumentSource, table: NDArray[np.int64], encoder: DocumentEncoder, held: float | None
    ) -> None:
        self._source = source
        self._table = table
        self._encoder = encoder
        self._held = held
        self._counts: dict[int, int] = {}

    def learn(self, blocks: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Take what is known of other runs or ranks."""
        self._counts.update(zip(blocks.tolist(), counts.tolist(), strict=True))

    def __len__(self) -> int:
        """Blocks that are trained on."""
        return len(self._table)

    def count(self, block: int) -> int | None:
        """Return the tokens of a block; None when nobody has counted them yet."""
        return self._counts.get(block)

    def read(self, block: int) -> BlockTokens:
        """Tokenise a block. Raises UserError or StorageError."""
        parts = self._encoder.encode(self._source, FileBlock(*self._table[block].tolist()))
        kept = [
            part.tokens if self._held is None else part.select(~held_back(part.documents, self._held)).tokens
            for part in parts
        ]
        tokens = np.concatenate(kept) if kept else np.empty(0, self._encoder.dtype)
        if len(tokens) and tokens[-1] != self._encoder.end:
            tokens = np.append(tokens, self._encoder.dtype.type(self._encoder.end))
        self._counts[block] = len(tokens)
        skipped = tuple(skipped for part in parts for skipped in part.skipped)
        documents = sum(int((part.tokens == self._encoder.end).sum()) for part in parts)
        return BlockTokens(tokens, skipped, 0 if self._source.has_lines else documents + len(skipped))


Blocks = PreparedBlocks | TextBlocks


@dataclass(slots=True)
class _Stream:
    """One lane's stream of one source."""

    blocks: Blocks
    lane: int
    lanes: int
    seed: int
    name: str
    _next: int = 0  # which of the lane's blocks is read next
    _buffer: list[NDArray[Any]] = field(default_factory=list)
    _buffered: int = 0
    _empty: int = 0  # blocks without a token, one after the other

    def _block(self) -> int:
        return shuffled(self.lane + self._next * self.lanes, len(self.blocks), self.seed)

    def seek(self, token: int, log: _Log) -> None:
        """Let the stream begin at a token, counted from the beginning of the run."""
        self._next, self._buffer, self._buffered = 0, [], 0
        while True:
            block = self._block()
            count = self.blocks.count(block)
            if count is None:
                count = len(log.read(self.blocks, block, used=False))
            if count > token:
                break
            token -= count
            self._advance(count)
        self._fill(token + 1, log)
        self._take(token)

    def _advance(self, count: int) -> None:
        self._next += 1
        self._empty = 0 if count else self._empty + 1
        if self._empty > len(self.blocks):
            raise UserError(f"data.source {self.name}: holds no text to train on: give a source with text in it")

    def _fill(self, wanted: int, log: _Log) -> None:
        while self._buffered < wanted:
            tokens = log.read(self.blocks, self._block(), used=True)
            self._advance(len(tokens))
            if len(tokens):
                self._buffer.append(tokens)
                self._buffered += len(tokens)

    def _take(self, count: int) -> None:
        """Drop tokens from the front."""
        self._buffered -= count
        while count:
            first = self._buffer[0]
            dropped = min(count, len(first))
            if dropped == len(first):
                self._buffer.pop(0)
            else:
                self._buffer[0] = first[dropped:]
            count -= dropped

    def sample(self, length: int, log: _Log) -> NDArray[Any]:
        """Return the next `length` tokens and the one after them, with which the next sample begins."""
        self._fill(length + 1, log)
        parts, missing = [], length + 1
        for part in self._buffer:
            parts.append(part[:missing])
            missing -= len(parts[-1])
            if not missing:
                break
        tokens = parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
        self._take(length)
        return tokens


@dataclass(slots=True)
class _Log:
    """Facts that become known while blocks are read."""

    numbers: dict[int, int]
    counts: list[tuple[int, int, int]] = field(default_factory=list)
    used: list[tuple[int, BlockTokens]] = field(default_factory=list)

    def read(self, blocks: Blocks, block: int, *, used: bool) -> NDArray[Any]:
        """Return the tokens of a block."""
        found, source = blocks.read(block), self.numbers[id(blocks)]
        if isinstance(blocks, TextBlocks):
            self.counts.append((source, block, len(found.tokens)))
        if used:
            self.used.append((source, replace(found, tokens=found.tokens[:0])))
        return found.tokens


class Lanes:
    """Some of the lanes, step by step."""

    def __init__(self, plan: LanePlan, lanes: Sequence[int], blocks: Sequence[Blocks]) -> None:
        self._plan = plan
        self._numbers = {id(each): number for number, each in enumerate(blocks)}
        self._step = -1
        weights = [source.weight for source in plan.sources]
        self._mixtures = []
        self._streams: list[list[_Stream]] = []
        orders = [Permutation(plan.lanes, plan.seed, number) for number in range(len(weights))]
        for lane in lanes:
            # At each step the lanes have the sources in their shares too.
            phase = [(order[lane] + 0.5) / plan.lanes for order in orders]
            self._mixtures.append(Mixture(weights, plan.seed, phase))
            self._streams.append(
                [
                    _Stream(each, lane, plan.lanes, plan.seed + 7919 * number, plan.sources[number].spec.name)
                    for number, each in enumerate(blocks)
                ]
            )

    def rows(self, step: int) -> Rows:
        """Return the samples of a step; quick for the step after the last one. Raises UserError or StorageError."""
        log = _Log(self._numbers)
        length = self._plan.sequence_length
        if step != self._step + 1 or self._step < 0:
            for mixture, streams in zip(self._mixtures, self._streams, strict=True):
                for source, stream in enumerate(streams):
                    stream.seek(mixture.before(step, source) * length, log)
        self._step = step
        rows = [
            streams[mixture[step][0]].sample(length, log)
            for mixture, streams in zip(self._mixtures, self._streams, strict=True)
        ]
        return Rows(rows, log.counts, log.used)


# ---- what is called in a tokenising process, by reference -----------------------------------------------------------

_installed: dict[str, Any] = {}


def install_lanes(plan: LanePlan, lanes: Sequence[int], known: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    """Prepare this process for some lanes; `known` has blocks and their counts for each source."""
    encoder = DocumentEncoder(Path(plan.tokenizer), plan.beginning)
    blocks: list[Blocks] = []
    for source, (numbers, counts) in zip(plan.sources, known, strict=True):
        if source.prepared is not None:
            blocks.append(PreparedBlocks(source.prepared, source.blocks, plan.held_back))
            continue
        assert source.table is not None
        table: NDArray[np.int64] = np.load(source.table, mmap_mode="r")[: source.blocks]
        text = TextBlocks(source.spec.source, table, encoder, plan.held_back)
        text.learn(numbers, counts)
        blocks.append(text)
    _installed["lanes"] = Lanes(plan, lanes, blocks)


def rows_of(step: int) -> Rows:
    """Return the samples of a step."""
    rows: Rows = _installed["lanes"].rows(step)
    return rows
