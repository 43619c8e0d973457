"""Open a data configuration as examples that can be trained on, and report what was done with the records.

Guarantees:
- Every rank that reads the same records under the same configuration gets the same samples and identity.
- Records that are held back are never trained on, and stay on their side when data are added.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_contract.trainer.data import DataConfig, Tokenization, ValidationSplit
from trainium_contract.trainer.examples import DataFormat, LossOn
from trainium_trainer.data.batches.order import Mixture
from trainium_trainer.data.batches.samples import SampleRules, Samples, ValidationSet, refuse_weights
from trainium_trainer.data.examples.part import ExamplePart, PairPart
from trainium_trainer.data.examples.recipe import FORMAT, Recipe, build_recipe
from trainium_trainer.data.examples.store import BLOCK_BYTES, StoredExamples, build_examples
from trainium_trainer.data.examples.templates import BadRecordError, Filter
from trainium_trainer.data.prepared.cache import find_validation_source, list_sources, prepared_folder
from trainium_trainer.data.prepared.origins import Lines, train_once
from trainium_trainer.data.sources.documents import Record
from trainium_trainer.data.sources.hub import pin_revision
from trainium_trainer.data.tokens.encoding import Counts, held_back
from trainium_trainer.data.tokens.tokenizer import count_entries, digest_of, tokenizer_file, train_tokenizer
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from trainium_trainer.data.prepared.build import BuildProgress


_BARS = 12
_USUAL = 0.98


@dataclass(frozen=True, slots=True)
class DataReport:
    """Counts of all sources together."""

    counts: Counts
    examples: int
    """Examples that remain, those that are held back among them."""
    held_back: int
    skipped: int
    """Records that could not be used."""
    sequences: int
    """Samples of one epoch."""
    tokens: int
    """Positions that examples take in them."""
    sequence_length: int
    lengths: NDArray[Any]
    """Tokens of each example before it was cut or dropped."""

    @property
    def used(self) -> float:
        """Share of the positions of an epoch that hold an example."""
        return self.tokens / max(1, self.sequences * self.sequence_length)

    def line(self) -> str:
        """All of it in a line."""
        parts = [f"{self.examples:,} examples of {self.counts.records:,} records"]
        named = (
            (self.counts.filtered, "filtered"),
            (self.counts.left_out, "left out by the function"),
            (self.skipped, "skipped"),
            (self.counts.dropped, "dropped as too long"),
            (self.counts.cut, "cut"),
            (self.held_back, "held back"),
        )
        parts += [f"{count:,} {name}" for count, name in named if count]
        parts.append(f"{self.sequences:,} sequences with {self.used:.1%} of their positions used")
        return ", ".join(parts)

    def histogram(self) -> list[tuple[int, int, int]]:
        """First and last length of a bar, and how many examples have such a length.

        Bars are of one width but for the last one, which holds the few that are much longer than the others.
        """
        if not len(self.lengths):
            return []
        width = max(1, -(-int(np.quantile(self.lengths, _USUAL)) // _BARS))
        counts = np.bincount(np.minimum((self.lengths - 1) // width, _BARS))
        bars = [(number * width + 1, (number + 1) * width, int(count)) for number, count in enumerate(counts)]
        first, last, count = bars[-1]
        return [*bars[:-1], (first, max(last, int(self.lengths.max())), count)]


def _learn(recipes: tuple[Recipe, ...], vocab_size: int, file: str) -> None:
    """Train and save; called in a child process, whose memory and threads end with it."""
    train_tokenizer([_texts(recipe) for recipe in recipes], vocab_size).save(file)


def _texts(recipe: Recipe) -> Iterator[str]:
    source, maker, chosen = recipe.spec.source, recipe.maker(()), Filter(recipe.config.where)
    for block in source.blocks(BLOCK_BYTES):
        for item in source.all_records(block):
            if not isinstance(item, Record) or not chosen(item.fields):
                continue
            try:
                examples = maker.examples(item)
            except BadRecordError:  # counted when the examples are encoded
                continue
            yield from (example.text for example in examples)


_log = logging.getLogger("trainium.data")


@dataclass(frozen=True, slots=True)
class ExampleSource:
    """One source with its examples."""

    recipe: Recipe
    weight: float
    stored: StoredExamples
    held: NDArray[np.bool_]
    """Whether each example is held back."""


@dataclass(frozen=True, slots=True)
class OpenExamples:
    """Open examples."""

    training: Samples
    validation: ValidationSet | None
    identity: str
    tokenizer: Path
    report: DataReport
    sources: tuple[ExampleSource, ...]


def open_examples(
    config: DataConfig,
    cache: Path,
    global_size: int,
    *,
    epochs: float = 0.0,
    progress: Callable[[BuildProgress], None] | None = None,
) -> OpenExamples:
    """Open the examples for batches of `global_size` samples; what is not in the cache is encoded first.

    Raises UserError or StorageError.
    """
    _refuse(config, cache)
    tokenizer = find_tokenizer(config, cache)
    sources = open_sources(config, tokenizer, cache, progress)
    weights = [source.weight for source in sources]
    batch = global_size if epochs else None
    if batch is not None:
        refuse_weights(weights)
    examples, pairs = config.examples, config.format is DataFormat.PREFERENCE
    rules = SampleRules(
        sequence_length=config.sequence_length,
        vocabulary=count_entries(tokenizer),
        packed=config.masked,
        rows=config.rows_per_sample,
        padding=sources[0].stored.manifest.end_of_document,
    )

    def part(source: ExampleSource, chosen: NDArray[np.bool_]) -> ExamplePart | PairPart:
        if pairs:
            return PairPart(source.recipe.source, source.stored, chosen, whole=examples.loss is LossOn.ALL)
        return ExamplePart(
            source.recipe.source,
            source.stored,
            chosen,
            config.sequence_length,
            packing=examples.packing,
            masked=config.masked,
        )

    parts = [part(source, ~source.held) for source in sources]
    for one in parts:
        if not one.sequences:
            raise UserError(
                f"data.source {one.name}: all of its examples are held back: lower data.validation.fraction"
            )
    training = Samples(parts, Mixture(weights, config.seed), seed=config.seed, rules=rules, epoch_batch=batch)
    validation = None
    if config.validation is not None:
        if find_validation_source(config) is not None:
            held, weights = [_validation_source(config, sources[0], cache)], [1.0]
        else:
            held = list(sources)
        measured = Samples(
            [part(source, source.held) for source in held], Mixture(weights, config.seed), seed=config.seed, rules=rules
        )
        validation = ValidationSet(measured, config.validation.samples)
    identity = _identity(config, sources, tokenizer, batch)
    return OpenExamples(training, validation, identity, tokenizer, _report(config, sources, parts), tuple(sources))


def _refuse(config: DataConfig, cache: Path) -> None:
    """Refuse what examples cannot be had with. Raises UserError."""
    if config.tokenization is Tokenization.ONLINE:
        raise UserError(
            f"data.tokenization is Online, but data.format {config.format} is always encoded before the first step: "
            "leave data.tokenization out"
        )
    for name, _, _ in list_sources(config):
        if prepared_folder(name, cache) is not None:
            raise UserError(
                f"data.source {name}: is prepared text, which has no records: set data.format to Text, or give the "
                "records"
            )


def find_tokenizer(config: DataConfig, cache: Path) -> Path:
    """Return the tokenizer's file, trained on the examples when none is given. Raises UserError or StorageError."""
    if config.tokenizer.path is not None:
        file = tokenizer_file(config.tokenizer)
        count_entries(file)
        return file
    recipes = [build_recipe(config, name, None) for name, _, _ in list_sources(config)]
    parts = [config.tokenizer.vocab_size, [recipe.key(cache) for recipe in recipes]]
    return train_once(parts, cache, _learn, tuple(recipes), config.tokenizer.vocab_size)


def open_sources(
    config: DataConfig, tokenizer: Path, cache: Path, progress: Callable[[BuildProgress], None] | None = None
) -> list[ExampleSource]:
    """Each source, encoded. Raises UserError or StorageError."""
    sources = []
    for name, _, weight in list_sources(config):
        recipe = build_recipe(config, name, tokenizer)
        stored = _stored(config, recipe, cache, progress)
        sources.append(ExampleSource(recipe, weight, stored, _held(config, stored)))
    fraction = config.validation.fraction if config.validation is not None else None
    for source in sources if fraction is not None else ():
        if not source.held.any():
            raise UserError(
                f"data.validation: {source.recipe.source} has no example to hold back: raise data.validation.fraction, "
                "set data.validation.split to Tail, or give data.validation.source"
            )
    return sources


def open_validation_sources(config: DataConfig, tokenizer: Path, cache: Path) -> list[ExampleSource]:
    """Return the sources with held-back examples. Raises UserError or StorageError."""
    sources = open_sources(config, tokenizer, cache)
    if find_validation_source(config) is not None:
        return [_validation_source(config, sources[0], cache)]
    return sources


def _validation_source(config: DataConfig, first: ExampleSource, cache: Path) -> ExampleSource:
    """Return all of the separate source of `data.validation`, made as the first source is."""
    source = find_validation_source(config)
    assert source is not None
    recipe = replace(first.recipe, source=pin_revision(source))
    stored = _stored(config, recipe, cache, None)
    return ExampleSource(recipe, 1.0, stored, np.ones(len(stored), np.bool_))


def _stored(
    config: DataConfig, recipe: Recipe, cache: Path, progress: Callable[[BuildProgress], None] | None
) -> StoredExamples:
    key = recipe.key(cache)
    folder = cache / f"examples-{key[:32]}"
    manifest = build_examples(folder, recipe, key, workers=config.workers, progress=progress or Lines(recipe.source))
    if manifest.skipped:
        first = manifest.examples[0]
        _log.warning("data.source %s: skipped %d records, the first: %s", recipe.source, manifest.skipped, first)
    if unused := manifest.counts.unused:
        shown = ", ".join(f"{name} ({count:,} records)" for name, count in unused.items())
        _log.info("data.source %s: not used: %s", recipe.source, shown)
    return StoredExamples(folder)


def _held(config: DataConfig, stored: StoredExamples) -> NDArray[np.bool_]:
    held, number = config.validation, len(stored)
    if held is None or held.fraction is None:
        return np.zeros(number, np.bool_)
    if held.split is ValidationSplit.TAIL:
        width = config.rows_per_sample
        return np.arange(number) // width >= int(number // width * (1 - held.fraction))
    return held_back(stored.records, held.fraction)


def _identity(config: DataConfig, sources: Sequence[ExampleSource], tokenizer: Path, batch: int | None) -> str:
    """Return a digest of all that the stream of samples depends on.

    What examples are made from (records, templates, filter, loss, function) is in the digests of what was made.
    """
    held = config.validation
    fraction = held.fraction if held is not None else None
    facts = {
        "format": FORMAT,
        "examples": [source.stored.manifest.identity for source in sources],
        "tokenizer": digest_of(tokenizer),
        "weights": [source.weight for source in sources],
        "validation": [fraction, held.split] if held is not None and fraction is not None else None,
        "packing": config.examples.packing,
        "masks": config.masked,
        "epochs": batch,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _report(
    config: DataConfig, sources: Sequence[ExampleSource], parts: Sequence[ExamplePart | PairPart]
) -> DataReport:
    made, width = [source.stored.manifest for source in sources], config.rows_per_sample
    counts = Counts()
    for one in made:
        counts.add(one.counts)
    return DataReport(
        counts=counts,
        examples=sum(one.documents for one in made) // width,
        held_back=sum(int(source.held.sum()) for source in sources) // width,
        skipped=sum(one.skipped for one in made),
        sequences=sum(part.sequences for part in parts) * width,
        tokens=sum(int(part.used.sum()) for part in parts),
        sequence_length=config.sequence_length,
        lengths=np.concatenate([source.stored.before for source in sources]),
    )
