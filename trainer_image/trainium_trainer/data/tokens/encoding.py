"""Train tokenizers, and turn blocks of a source into tokens, in worker processes.

Guarantees:
- A tokenizer is trained once per machine, sources and vocabulary size, and its file is complete.
- Training on the same text gives the same tokenizer, which never has more entries than configured and encodes every
  byte, so no text has unknown tokens.
- The tokens of a block are a pure function of block, tokenizer and `data.bos`.
- Each document ends with the end-of-document token, which occurs nowhere else.
- A document without text has no tokens.
- A block is read again from its beginning if the store fails during a read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.cache import create_once
from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, SkippedRecord, TextPiece
from trainium_trainer.data.sources.files import read_with_retries
from trainium_trainer.data.tokens.special_tokens import NO_BOS_PREFIX, BosPrefix
from trainium_trainer.data.tokens.tokenizer import (
    END_OF_DOCUMENT,
    TOKENIZER_FILE,
    count_entries,
    find_end_of_document,
    load_tokenizer,
)
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from trainium_trainer.data.sources.resolve import SourceSpec


_PIECES, _CHARACTERS = 512, 4 << 20  # tokenized in one call
_TOKENS = 1 << 20  # approximate size of a TokenBlock
_UNUSED = 32
"""The maximum number of unused fields that are counted."""


@dataclass(slots=True)
class RecordCounts:
    """The counts of records by outcome."""

    records: int = 0
    unreadable: int = 0
    """Lines and rows that are not records."""
    filtered: int = 0
    """Records filtered by data.examples.where."""
    left_out: int = 0
    """Records left out by the user's function."""
    cut: int = 0
    dropped: int = 0
    shortest_dropped: int = 0
    """The tokens of the shortest dropped example."""
    found: dict[str, dict[str, None]] = field(default_factory=dict)
    """Some values of the fields of data.examples.where."""
    unused: dict[str, int] = field(default_factory=dict)
    """The number of records with a field on which no example depends, by field."""

    def add(self, other: RecordCounts) -> None:
        """Add the counts of another block."""
        for name in ("records", "unreadable", "filtered", "left_out", "cut", "dropped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        lengths = [length for length in (self.shortest_dropped, other.shortest_dropped) if length]
        self.shortest_dropped = min(lengths, default=0)
        for name, values in other.found.items():
            seen = self.found.setdefault(name, {})
            seen |= dict.fromkeys(list(values)[: 8 - len(seen)])
        for name, number in other.unused.items():
            if name in self.unused or len(self.unused) < _UNUSED:
                self.unused[name] = self.unused.get(name, 0) + number


@dataclass(frozen=True, slots=True)
class ExampleColumns:
    """The columns of examples besides the tokens."""

    loss_mask: NDArray[np.bool_]
    """Whether each token is learned."""
    answers: NDArray[np.int64]
    """The index of the first token of the last answer of each example."""
    original_lengths: NDArray[np.int64]
    """The tokens of every example before it was cut or dropped."""


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """The tokens of consecutive pieces of documents, or of examples."""

    tokens: NDArray[Any]
    """uint16 or uint32."""
    lengths: NDArray[np.int64]
    """The number of tokens of each piece; the last piece of a document ends with the end-of-document token."""
    documents: NDArray[np.uint64]
    """The hash of the document or record of each piece, which decides what is held back for validation."""
    skipped: tuple[SkippedRecord, ...] = ()
    examples: ExampleColumns | None = None
    """The columns of examples; None for documents."""
    counts: RecordCounts | None = None
    """The counts of records; None for documents."""

    def select(self, chosen: NDArray[np.bool_]) -> TokenBlock:
        """Return the block with only the chosen pieces of documents."""
        return replace(
            self,
            tokens=self.tokens[np.repeat(chosen, self.lengths)],
            lengths=self.lengths[chosen],
            documents=self.documents[chosen],
        )


def choose_token_type(vocabulary: int) -> np.dtype[Any]:
    """Return the narrowest type for token ids."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


class DocumentEncoder:
    """A tokenizer with its end-of-document token and the BOS prefix of documents."""

    def __init__(self, file: Path, bos_prefix: BosPrefix = NO_BOS_PREFIX) -> None:
        """Load a `tokenizer.json`. Raises UserError."""
        self.vocabulary = count_entries(file)
        self.dtype = choose_token_type(self.vocabulary)
        self._tokenizer = load_tokenizer(file)
        self.end = find_end_of_document(file)
        self._bos_prefix = bos_prefix

    def encode_block(self, source: DocumentSource, block: FileBlock) -> list[TokenBlock]:
        """Return the tokens of a block. Raises UserError or StorageError."""
        return read_with_retries(
            source.find_file_name(block),
            lambda: list(self._encode_blocks(source.read(block), source.find_file_name(block))),
        )

    def _encode_blocks(self, items: Iterable[TextPiece | SkippedRecord], name: str) -> Iterator[TokenBlock]:
        rows: list[NDArray[Any]] = []
        hashes: list[int] = []
        skipped: list[SkippedRecord] = []
        gathered = 0
        document: int | None = None
        opened = begins = False  # whether the current document has had tokens, and has yet to begin

        def create_block() -> TokenBlock:
            lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
            tokens = np.concatenate(rows) if rows else np.empty(0, self.dtype)
            return TokenBlock(tokens, lengths, np.array(hashes, np.uint64), tuple(skipped))

        for pieces in _group_into_batches(items, skipped):
            for piece, ids in zip(pieces, self._encode_pieces(pieces, name), strict=True):
                if document is None:
                    document, begins = _hash_text(piece), piece.begins_document
                tokens = ids
                if begins and len(ids):
                    begins = False
                    if self._bos_prefix != NO_BOS_PREFIX:
                        tokens = np.array(self._bos_prefix.prepend_to(ids.tolist())[0], self.dtype)
                opened = opened or len(ids) > 0
                if piece.ends_document and opened and not (len(tokens) and tokens[-1] == self.end):
                    tokens = np.append(tokens, self.dtype.type(self.end))
                if len(tokens):
                    rows.append(tokens)
                    hashes.append(document)
                    gathered += len(tokens)
                if piece.ends_document:
                    document, opened = None, False
            if gathered >= _TOKENS:
                yield create_block()
                rows, hashes, gathered = [], [], 0
                skipped.clear()
        if rows or skipped:
            yield create_block()

    def _encode_pieces(self, pieces: list[TextPiece], name: str) -> list[NDArray[Any]]:
        texts = [piece.text for piece in pieces]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [
            np.array(encoding.ids, self.dtype) if piece.ids is None else self._check_ids(piece.ids, name)
            for piece, encoding in zip(pieces, encodings, strict=True)
        ]

    def _check_ids(self, ids: NDArray[Any], name: str) -> NDArray[Any]:
        """Check token ids that the source provides. Raises UserError."""
        for bound in (ids.min(), ids.max()) if len(ids) else ():
            if not 0 <= bound < self.vocabulary:
                raise UserError(
                    f"data.source {name}: holds token id {bound}, but the tokenizer has {self.vocabulary} entries: "
                    "set data.tokenizer.path to the tokenizer that these ids are from"
                )
        return ids.astype(self.dtype)


def _group_into_batches(
    items: Iterable[TextPiece | SkippedRecord], skipped: list[SkippedRecord]
) -> Iterator[list[TextPiece]]:
    """Yield pieces in batches large enough for a call of the tokenizer; append skipped lines to `skipped`."""
    batch: list[TextPiece] = []
    characters = 0
    for item in items:
        if isinstance(item, SkippedRecord):
            skipped.append(item)
            continue
        batch.append(item)
        characters += len(item.text)
        if len(batch) == _PIECES or characters >= _CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _hash_text(piece: TextPiece) -> int:
    """Return a 64-bit hash of a document that does not depend on the run or the tokenizer."""
    text = piece.document or piece.text
    data = piece.ids.astype("<i8").tobytes() if piece.ids is not None else text.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def select_held_back(documents: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Return a mask of the pieces held back for validation, a share of `fraction`."""
    return documents < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))


# ---- tokenizers that are trained on the data -------------------------------------------------------------------------

_TOKENIZER_FORMAT = 1
_TRAINING_CHARACTERS = 64 * 1024 * 1024
_TRAINING_BLOCK_BYTES = 4 << 20


def train_tokenizer(texts: Iterable[Iterator[str]], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` entries on the first 64 million characters.

    Several streams of text contribute equal parts.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - few runs train one

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    streams = list(texts)
    share = _TRAINING_CHARACTERS // len(streams)
    tokenizer.train_from_iterator((text for stream in streams for text in _take_characters(stream, share)), trainer)
    return tokenizer


def _take_characters(stream: Iterator[str], remaining: int) -> Iterator[str]:
    for text in stream:
        yield text[:remaining]
        remaining -= len(text)
        if remaining <= 0:
            return


def train_for_texts(specs: Sequence[SourceSpec], vocab_size: int, cache: Path) -> Path:
    """Train a tokenizer for these sources; return its `tokenizer.json`. Raises UserError, StorageError, WorkerError."""
    parts = [_TOKENIZER_FORMAT, vocab_size, [spec.source.compute_identity(cache) for spec in specs]]
    return train_once(parts, cache, _train_and_save, tuple(specs), vocab_size)


def train_once(parts: list[Any], cache: Path, train: Callable[..., None], *arguments: Any) -> Path:
    """Return the file that `train(*arguments, file)` writes in a process, unless the cache has one for `parts`."""
    folder = cache / f"tokenizer-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"

    def create() -> None:
        temporary = folder.with_name(folder.name + ".unfinished")
        temporary.mkdir(exist_ok=True)
        with Workers(1) as workers:
            workers.call(train, *arguments, str(temporary / TOKENIZER_FILE))
        temporary.rename(folder)

    return create_once(folder, create) / TOKENIZER_FILE


def _train_and_save(specs: tuple[SourceSpec, ...], vocab_size: int, file: str) -> None:
    """Train and save a tokenizer; called in a child process, so that its memory and threads end with it."""
    train_tokenizer([_iterate_texts(spec.source) for spec in specs], vocab_size).save(file)


def _iterate_texts(source: DocumentSource) -> Iterator[str]:
    for block in source.divide_into_blocks(_TRAINING_BLOCK_BYTES):
        yield from (item.text for item in source.read_documents(block) if isinstance(item, TextPiece))


def list_blocks(spec: SourceSpec, target: int) -> list[FileBlock]:
    """Return the blocks of a source; called in a worker process, where threads and memory do not matter."""
    return spec.source.divide_into_blocks(target)
