"""Turn a block of records into tokens, in a worker process.

Guarantees:
- The result is a pure function of the block and the recipe.
- A block is read again from its beginning when the store failed on the way.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.examples.encode import Encoded, TextEncoder, fit_together
from trainium_trainer.data.examples.templates import BadRecordError, Example, Filter, without_nulls
from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Record, Skipped
from trainium_trainer.data.sources.files import read_with_retries
from trainium_trainer.data.tokens.encoding import Counts, ExampleColumns, TokenBlock, token_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trainium_trainer.data.examples.recipe import ExampleMaker, Recipe

_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Made:
    """An example that is left, with the hash of its record."""

    example: Example
    encoded: Encoded
    record: int


class ExampleEncoder:
    """Makes and encodes the examples of one source."""

    def __init__(self, recipe: Recipe) -> None:
        """Load tokenizer, templates and function. Raises UserError."""
        assert recipe.tokenizer is not None
        self._recipe = recipe
        self.texts = TextEncoder(Path(recipe.tokenizer), recipe.special, recipe.bos)
        self.maker: ExampleMaker = recipe.maker(self.texts.specials)

    def encode(
        self, items: Iterable[Record | Skipped], counts: Counts, skipped: list[Skipped], before: list[int]
    ) -> Iterator[Made]:
        """Yield the examples that are kept; the other arguments count the others. Raises UserError."""
        config = self._recipe.config
        for batch in _batches(self._examples(items, counts, skipped)):
            encoded = self.texts.encode([example for example, _ in batch], self.maker.guard, config.loss)
            for start in range(0, len(batch), self.maker.width):
                group = encoded[start : start + self.maker.width]
                lengths = [len(one.ids) for one in group]
                before += lengths
                kept = fit_together(group, self._recipe.most, config.too_long)
                if kept is None:
                    counts.dropped += 1
                    counts.shortest_dropped = min(counts.shortest_dropped or max(lengths), max(lengths))
                    continue
                counts.cut += any(len(one.ids) < length for one, length in zip(kept, lengths, strict=True))
                for (example, record), one in zip(batch[start:], kept, strict=False):
                    yield Made(example, one, record)

    def block(self, items: Iterable[Record | Skipped]) -> TokenBlock:
        """Encode a block, and return its examples as arrays."""
        counts, skipped, before = Counts(), list[Skipped](), list[int]()
        made = list(self.encode(items, counts, skipped, before))
        dtype = token_type(self.texts.vocabulary)
        rows, dropped = [one.encoded for one in made], [0] * (len(before) - len(made))
        return TokenBlock(
            tokens=np.concatenate([row.ids for row in rows]).astype(dtype) if rows else np.empty(0, dtype),
            lengths=np.array([len(row.ids) for row in rows] + dropped, np.int64),
            documents=np.array([one.record for one in made] + dropped, np.uint64),
            skipped=tuple(skipped),
            examples=ExampleColumns(
                trained=np.concatenate([row.trained for row in rows]) if rows else np.empty(0, np.bool_),
                answers=np.array([row.answer for row in rows] + dropped, np.int64),
                before=np.array(before, np.int64),
            ),
            counts=counts,
        )

    def _examples(
        self, items: Iterable[Record | Skipped], counts: Counts, skipped: list[Skipped]
    ) -> Iterator[tuple[Example, int]]:
        chosen = Filter(self._recipe.config.where)
        counts.found = chosen.found
        listed = list(items)
        known = list_known_fields(listed)
        for item in listed:
            if isinstance(item, Skipped):
                skipped.append(item)
                counts.unreadable += 1
                continue
            counts.records += 1
            for name in self.maker.unused(item.fields):
                if item.fields.get(name, ...) is not None and name not in self._recipe.config.where:
                    counts.unused[name] = counts.unused.get(name, 0) + 1
            if not chosen(known | item.fields if item.fields else {}):
                counts.filtered += 1
                continue
            try:
                examples = self._of_record(item, known)
            except BadRecordError as error:
                skipped.append(item.skipped(str(error)))
                continue
            counts.left_out += not examples
            yield from ((example, hash_record(item.fields)) for example in examples)

    def _of_record(self, record: Record, known: dict[str, None]) -> tuple[Example, ...]:
        """Build the examples of a record; a field that other records have is null, as it is in a table.

        Raises BadRecordError.
        """
        if record.fields and len(record.fields) < len(known):
            try:
                return self.maker.examples(replace(record, fields=known | record.fields))
            except BadRecordError:
                pass  # the next line names the field that is missing
        return self.maker.examples(record)


def list_known_fields(items: Iterable[Record | Skipped]) -> dict[str, None]:
    """Return the names of the fields that records of a block have."""
    return dict.fromkeys(name for item in items if isinstance(item, Record) for name in item.fields)


def hash_record(fields: Mapping[str, Any]) -> int:
    """Return 64 bits that name a record, whatever the order of its fields and whether missing ones are null."""
    text = json.dumps(without_nulls(fields), sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _batches(examples: Iterator[tuple[Example, int]]) -> Iterator[list[tuple[Example, int]]]:
    batch: list[tuple[Example, int]] = []
    for one in examples:
        batch.append(one)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


# ---- what is called in a worker process, by reference ---------------------------------------------------------------

_installed: dict[str, Any] = {}


def install(recipe: Recipe) -> tuple[int, int]:
    """Prepare this process; returns the vocabulary's size and the token that fills up."""
    _installed["encoder"] = ExampleEncoder(recipe)
    _installed["source"] = recipe.spec.source
    return _installed["encoder"].texts.vocabulary, _installed["encoder"].texts.padding


def encode_block(_: int, block: FileBlock) -> list[TokenBlock]:
    """Return the examples of a block of the installed source."""
    source: DocumentSource = _installed["source"]
    encoder: ExampleEncoder = _installed["encoder"]
    return [read_with_retries(source.named(block), lambda: encoder.block(source.records(block)))]
