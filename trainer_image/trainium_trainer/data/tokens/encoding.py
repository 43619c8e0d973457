"""Turn a block of a source into tokens, in a worker process.

Guarantees:
- The tokens of a block are a pure function of block, tokenizer and `data.bos`.
- Each document ends with the end-of-document token, which occurs nowhere else.
- A document without text leaves no trace.
- A block is read again from its beginning when the store failed on the way.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Skipped, TextPiece
from trainium_trainer.data.sources.files import read_with_retries
from trainium_trainer.data.tokens.tokenizer import (
    AS_IT_IS,
    BosPrefix,
    count_entries,
    find_end_of_document,
    load_tokenizer,
)
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from trainium_trainer.data.sources.resolve import SourceSpec


_PIECES, _CHARACTERS = 512, 4 << 20  # that are tokenised at once
_TOKENS = 1 << 20  # of one TokenBlock, about
_UNUSED = 32
"""Names of unused fields that are counted."""


@dataclass(slots=True)
class Counts:
    """Numbers of records by what was done with them."""

    records: int = 0
    unreadable: int = 0
    """Lines and rows that are no records."""
    filtered: int = 0
    """By data.examples.where."""
    left_out: int = 0
    """By the user's function."""
    cut: int = 0
    dropped: int = 0
    shortest_dropped: int = 0
    """Tokens of the shortest example that was dropped."""
    found: dict[str, dict[str, None]] = field(default_factory=dict)
    """Some values of the fields that data.examples.where asks for."""
    unused: dict[str, int] = field(default_factory=dict)
    """Records that hold what no example depends on, by its name."""

    def add(self, other: Counts) -> None:
        """Take another's numbers too."""
        for name in ("records", "unreadable", "filtered", "left_out", "cut", "dropped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        known = [length for length in (self.shortest_dropped, other.shortest_dropped) if length]
        self.shortest_dropped = min(known, default=0)
        for name, values in other.found.items():
            seen = self.found.setdefault(name, {})
            seen |= dict.fromkeys(list(values)[: 8 - len(seen)])
        for name, number in other.unused.items():
            if name in self.unused or len(self.unused) < _UNUSED:
                self.unused[name] = self.unused.get(name, 0) + number


@dataclass(frozen=True, slots=True)
class ExampleColumns:
    """Columns of examples beside their tokens."""

    trained: NDArray[np.bool_]
    """Whether each token is learned."""
    answers: NDArray[np.int64]
    """Place at which the last answer of each example begins."""
    before: NDArray[np.int64]
    """Tokens of every example before it was cut or dropped."""


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Tokens of consecutive pieces of documents, or of examples."""

    tokens: NDArray[Any]
    """uint16 or uint32."""
    lengths: NDArray[np.int64]
    """Tokens of each piece; the last piece of a document ends with the end-of-document token."""
    documents: NDArray[np.uint64]
    """Hash of the document or record that each piece is of: it decides what is held back for validation."""
    skipped: tuple[Skipped, ...] = ()
    examples: ExampleColumns | None = None
    """Columns of records; None for documents."""
    counts: Counts | None = None
    """Numbers of records; None for documents."""

    def select(self, chosen: NDArray[np.bool_]) -> TokenBlock:
        """Return the chosen pieces of documents, and what was skipped."""
        return replace(
            self,
            tokens=self.tokens[np.repeat(chosen, self.lengths)],
            lengths=self.lengths[chosen],
            documents=self.documents[chosen],
        )


def token_type(vocabulary: int) -> np.dtype[Any]:
    """Return the narrowest type for token ids."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


class DocumentEncoder:
    """A tokenizer with its end-of-document token, and how a document begins."""

    def __init__(self, file: Path, beginning: BosPrefix = AS_IT_IS) -> None:
        """Load a `tokenizer.json`. Raises UserError."""
        self.vocabulary = count_entries(file)
        self.dtype = token_type(self.vocabulary)
        self._tokenizer = load_tokenizer(file)
        self.end = find_end_of_document(file)
        self._beginning = beginning

    def encode(self, source: DocumentSource, block: FileBlock) -> list[TokenBlock]:
        """Return the tokens of a block. Raises UserError or StorageError."""
        return read_with_retries(
            source.named(block), lambda: list(self._blocks(source.read(block), source.named(block)))
        )

    def _blocks(self, items: Iterable[TextPiece | Skipped], name: str) -> Iterator[TokenBlock]:
        rows: list[NDArray[Any]] = []
        hashes: list[int] = []
        skipped: list[Skipped] = []
        gathered = 0
        document: int | None = None
        opened = begins = False  # whether the present document has had tokens, and is still to begin

        def finished() -> TokenBlock:
            lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
            tokens = np.concatenate(rows) if rows else np.empty(0, self.dtype)
            return TokenBlock(tokens, lengths, np.array(hashes, np.uint64), tuple(skipped))

        for pieces in _batches(items, skipped):
            for piece, ids in zip(pieces, self._ids(pieces, name), strict=True):
                if document is None:
                    document, begins = _hash_of(piece), piece.begins_document
                tokens = ids
                if begins and len(ids):
                    begins = False
                    if self._beginning != AS_IT_IS:
                        tokens = np.array(self._beginning.prepend_to(ids.tolist())[0], self.dtype)
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
                yield finished()
                rows, hashes, gathered = [], [], 0
                skipped.clear()
        if rows or skipped:
            yield finished()

    def _ids(self, pieces: list[TextPiece], name: str) -> list[NDArray[Any]]:
        texts = [piece.text for piece in pieces]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [
            np.array(encoding.ids, self.dtype) if piece.ids is None else self._checked(piece.ids, name)
            for piece, encoding in zip(pieces, encodings, strict=True)
        ]

    def _checked(self, ids: NDArray[Any], name: str) -> NDArray[Any]:
        """Return ids that the source has itself. Raises UserError."""
        for bound in (ids.min(), ids.max()) if len(ids) else ():
            if not 0 <= bound < self.vocabulary:
                raise UserError(
                    f"data.source {name}: holds token id {bound}, but the tokenizer has {self.vocabulary} entries: "
                    "set data.tokenizer.path to the tokenizer that these ids are from"
                )
        return ids.astype(self.dtype)


def _batches(items: Iterable[TextPiece | Skipped], skipped: list[Skipped]) -> Iterator[list[TextPiece]]:
    """Pieces in batches that are worth a call of the tokenizer; what is to be skipped goes into `skipped`."""
    batch: list[TextPiece] = []
    characters = 0
    for item in items:
        if isinstance(item, Skipped):
            skipped.append(item)
            continue
        batch.append(item)
        characters += len(item.text)
        if len(batch) == _PIECES or characters >= _CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _hash_of(piece: TextPiece) -> int:
    """64 bits that name a document, the same in every run and with every tokenizer that reads text."""
    text = piece.document or piece.text
    data = piece.ids.astype("<i8").tobytes() if piece.ids is not None else text.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def held_back(documents: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Return which pieces are for validation, of a share of `fraction`."""
    return documents < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))


# ---- what is called in a tokenising process, by reference -----------------------------------------------------------

_installed: dict[str, Any] = {}


def install(specs: tuple[SourceSpec, ...], tokenizer: str, beginning: BosPrefix) -> tuple[int, int]:
    """Prepare this process; returns the vocabulary's size and the id of the end-of-document token."""
    _installed["sources"] = [spec.source for spec in specs]
    encoder = _installed["encoder"] = DocumentEncoder(Path(tokenizer), beginning)
    return encoder.vocabulary, encoder.end


def encode(source: int, block: FileBlock) -> list[TokenBlock]:
    """Return the tokens of a block of an installed source."""
    blocks: list[TokenBlock] = _installed["encoder"].encode(_installed["sources"][source], block)
    return blocks


def list_blocks(spec: SourceSpec, target: int) -> list[FileBlock]:
    """Return the blocks of a source, listed where it may start threads and take memory."""
    return spec.source.blocks(target)
