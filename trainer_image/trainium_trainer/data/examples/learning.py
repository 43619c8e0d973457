"""A tokenizer trained on examples, for data without one.

Invariants: trained once per machine, sources, templates and vocabulary size; a file that is there is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_trainer.data.examples.build import BLOCK_BYTES
from trainium_trainer.data.examples.forms.example import BadRecordError
from trainium_trainer.data.examples.forms.filter import Filter
from trainium_trainer.data.prepared.learned_tokenizer import once
from trainium_trainer.data.sources.documents import Record
from trainium_trainer.data.sources.files import reading
from trainium_trainer.data.tokens.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from trainium_trainer.data.examples.recipe import Recipe
    from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Skipped


def learned_on_examples(recipes: Sequence[Recipe], vocab_size: int, cache: Path) -> Path:
    """The `tokenizer.json` of a tokenizer for these examples. Raises UserError, StorageError, WorkerError."""
    parts = [vocab_size, [recipe.key(cache) for recipe in recipes]]
    return once(parts, cache, _learn, tuple(recipes), vocab_size)


def _learn(recipes: tuple[Recipe, ...], vocab_size: int, file: str) -> None:
    """Train and save; called in a process of its own, whose memory and threads go with it."""
    train_tokenizer([_texts(recipe) for recipe in recipes], vocab_size).save(file)


def _texts(recipe: Recipe) -> Iterator[str]:
    source, maker, chosen = recipe.spec.open(), recipe.maker(()), Filter(recipe.config.where)
    for block in source.blocks(BLOCK_BYTES):
        for item in _records(source, block):
            if not isinstance(item, Record) or not chosen(item.fields):
                continue
            try:
                example = maker.example(item)
            except BadRecordError:  # counted when the examples are encoded
                continue
            if example is not None:
                yield example.text


def _records(source: DocumentSource, block: FileBlock) -> list[Record | Skipped]:
    return reading(source.named(block), lambda: list(source.records(block)))
