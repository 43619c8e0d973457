"""Open a data configuration as training examples, and report how many records were used.

Guarantees:
- Every rank that reads the same records under the same configuration gets the same samples and identity.
- Held-back records are never used in training, and stay held back when data are added.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_contract.pages.formatting import pluralize
from trainium_contract.trainer.data import DataConfig, Tokenization, ValidationSplit
from trainium_contract.trainer.examples import DataFormat, LossOn
from trainium_trainer.data.batches.samples import SampleRules, Samples, ValidationSet, refuse_weights
from trainium_trainer.data.examples.conversation import END_OF_REASONING
from trainium_trainer.data.examples.recipe import FORMAT, Recipe, build_recipe
from trainium_trainer.data.examples.record_filter import RecordFilter
from trainium_trainer.data.examples.record_format import BadRecordError
from trainium_trainer.data.examples.sample_sources import ExampleSampleSource, PairSampleSource
from trainium_trainer.data.examples.store import BLOCK_BYTES, ExampleInputs, StoredExamples
from trainium_trainer.data.prepared.build import build_in_cache
from trainium_trainer.data.prepared.text_sources import find_prepared_folder
from trainium_trainer.data.sources.documents import Record
from trainium_trainer.data.sources.resolve import SourceSpec, find_validation_source, list_sources
from trainium_trainer.data.tokens.encoding import RecordCounts, select_held_back, train_once, train_tokenizer
from trainium_trainer.data.tokens.tokenizer import count_entries, find_tokenizer_file, hash_tokenizer
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from trainium_trainer.data.prepared.build import BuildProgress


_HISTOGRAM_BARS = 12
_REGULAR_QUANTILE = 0.98
"""The part of the examples that the bars of one width hold."""


@dataclass(frozen=True, slots=True)
class DataReport:
    """The counts over all sources."""

    counts: RecordCounts
    examples: int
    """The remaining examples, including held-back ones."""
    held_back: int
    skipped: int
    """The number of unusable records."""
    sequences: int
    """Samples of one epoch."""
    tokens: int
    """The number of positions of the sequences that examples occupy."""
    sequence_length: int
    lengths: NDArray[Any]
    """The tokens of each example before it was cut or dropped."""

    @property
    def occupancy(self) -> float:
        """The fraction of the positions of an epoch that examples occupy."""
        return self.tokens / max(1, self.sequences * self.sequence_length)

    def format_line(self) -> str:
        """Format the report as one line."""
        parts = [f"{self.examples:,} examples of {self.counts.records:,} records"]
        outcomes = (
            (self.counts.filtered, "filtered"),
            (self.counts.left_out, "left out by the function"),
            (self.skipped, "skipped"),
            (self.counts.dropped, "dropped as too long"),
            (self.counts.cut, "cut"),
            (self.held_back, "held back"),
        )
        parts += [f"{count:,} {name}" for count, name in outcomes if count]
        parts.append(f"{self.sequences:,} sequences with {self.occupancy:.1%} of their positions used")
        return ", ".join(parts)

    def build_histogram(self) -> list[tuple[int, int, int]]:
        """Return the shortest and longest length of each bar and its number of examples.

        All bars have one width except the last one, which holds the few much longer examples.
        """
        if not len(self.lengths):
            return []
        width = max(1, -(-int(np.quantile(self.lengths, _REGULAR_QUANTILE)) // _HISTOGRAM_BARS))
        counts = np.bincount(np.minimum((self.lengths - 1) // width, _HISTOGRAM_BARS))
        bars = [(number * width + 1, (number + 1) * width, int(count)) for number, count in enumerate(counts)]
        first, last, count = bars[-1]
        return [*bars[:-1], (first, max(last, int(self.lengths.max())), count)]


def _train_and_save(recipes: tuple[Recipe, ...], vocab_size: int, file: str) -> None:
    """Train and save a tokenizer; called in a child process, so that its memory and threads end with it."""
    train_tokenizer([_iterate_texts(recipe) for recipe in recipes], vocab_size).save(file)


def _iterate_texts(recipe: Recipe) -> Iterator[str]:
    source, record_format, chosen = recipe.spec.source, recipe.record_format(()), RecordFilter(recipe.config.where)
    for block in source.divide_into_blocks(BLOCK_BYTES):
        for item in source.read_records(block):
            if not isinstance(item, Record) or not chosen(item.fields):
                continue
            try:
                examples = record_format.build_examples(item)
            except BadRecordError:  # counted when the examples are encoded
                continue
            yield from (example.text for example in examples)


_log = logging.getLogger("trainium.data")


@dataclass(frozen=True, slots=True)
class ExampleSource:
    """A source with its examples."""

    recipe: Recipe
    stored: StoredExamples
    held_back: NDArray[np.bool_]
    """Whether each example is held back."""

    @property
    def name(self) -> str:
        """The source, for messages."""
        return self.recipe.spec.name


@dataclass(frozen=True, slots=True)
class ExampleDataset:
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
    epoch_batch: int | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
) -> ExampleDataset:
    """Open the examples; encode those that are not in the cache first.

    `epoch_batch`: see `Samples`. Raises UserError or StorageError.
    """
    _refuse_unsupported(config, cache)
    tokenizer = find_tokenizer(config, cache)
    sources = open_sources(config, tokenizer, cache, progress)
    weights = [source.recipe.spec.weight for source in sources]
    if epoch_batch is not None:
        refuse_weights(weights)
    rules = SampleRules(
        sequence_length=config.sequence_length,
        vocabulary=count_entries(tokenizer),
        packed=config.masked,
        rows=config.rows_per_sample,
        padding=sources[0].stored.manifest.end_of_document,
    )

    sample_sources = [_build_sample_source(config, source, ~source.held_back) for source in sources]
    for sample_source in sample_sources:
        if not sample_source.count_samples(rules):
            raise UserError(
                f"data.source {sample_source.name}: all of its examples are held back: lower data.validation.fraction"
            )
    training = Samples(sample_sources, weights, seed=config.seed, rules=rules, epoch_batch=epoch_batch)
    validation = None
    if config.validation is not None:
        if find_validation_source(config) is not None:
            held_out, weights = [_open_validation_source(config, sources[0], cache)], [1.0]
        else:
            held_out = list(sources)
        held_back = Samples(
            [_build_sample_source(config, source, source.held_back) for source in held_out],
            weights,
            seed=config.seed,
            rules=rules,
        )
        validation = ValidationSet(held_back, config.validation.samples)
    identity = _compute_identity(config, sources, tokenizer, epoch_batch)
    return ExampleDataset(training, validation, identity, tokenizer, _report(config, sources, training), tuple(sources))


def _build_sample_source(
    config: DataConfig, source: ExampleSource, chosen: NDArray[np.bool_]
) -> ExampleSampleSource | PairSampleSource:
    """Build the samples of the chosen examples of a source."""
    examples = config.examples
    if config.format is DataFormat.PREFERENCE:
        learns_prompts = examples.loss is LossOn.ALL
        return PairSampleSource(source.name, source.stored, chosen, learns_prompts=learns_prompts)
    return ExampleSampleSource(
        source.name,
        source.stored,
        chosen,
        config.sequence_length,
        packing=examples.packing,
        masked=config.masked,
    )


def _refuse_unsupported(config: DataConfig, cache: Path) -> None:
    """Raise UserError for settings that examples do not support."""
    if config.tokenization is Tokenization.ONLINE:
        raise UserError(
            f"data.tokenization is Online, but data.format {config.format} is always encoded before the first step: "
            "leave data.tokenization out"
        )
    for spec in list_sources(config):
        if find_prepared_folder(spec.name, cache) is not None:
            raise UserError(
                f"data.source {spec.name}: is prepared text, which has no records: set data.format to Text, or give "
                "the records"
            )


def find_tokenizer(config: DataConfig, cache: Path) -> Path:
    """Return the tokenizer's file, trained on the examples when none is given. Raises UserError or StorageError."""
    if config.tokenizer.path is not None:
        file = find_tokenizer_file(config.tokenizer)
        count_entries(file)
        return file
    recipes = [build_recipe(config, spec, None) for spec in list_sources(config)]
    parts = [config.tokenizer.vocab_size, [recipe.compute_key(cache) for recipe in recipes]]
    return train_once(parts, cache, _train_and_save, tuple(recipes), config.tokenizer.vocab_size)


def open_sources(
    config: DataConfig, tokenizer: Path, cache: Path, progress: Callable[[BuildProgress], None] | None = None
) -> list[ExampleSource]:
    """Encode and open each source. Raises UserError or StorageError."""
    sources = []
    for spec in list_sources(config):
        recipe = build_recipe(config, spec, tokenizer)
        stored = _open_stored(config, recipe, cache, progress)
        sources.append(ExampleSource(recipe, stored, _find_held_back_examples(config, stored)))
    fraction = config.validation.fraction if config.validation is not None else None
    for source in sources if fraction is not None else ():
        if not source.held_back.any():
            raise UserError(
                f"data.validation: {source.name} has no example to hold back: raise data.validation.fraction, "
                "set data.validation.split to Tail, or give data.validation.source"
            )
    return sources


def open_validation_sources(config: DataConfig, tokenizer: Path, cache: Path) -> list[ExampleSource]:
    """Return the sources with held-back examples. Raises UserError or StorageError."""
    sources = open_sources(config, tokenizer, cache)
    if find_validation_source(config) is not None:
        return [_open_validation_source(config, sources[0], cache)]
    return sources


def _open_validation_source(config: DataConfig, first: ExampleSource, cache: Path) -> ExampleSource:
    """Open the separate source of `data.validation`, encoded like the first source."""
    name = find_validation_source(config)
    assert name is not None
    recipe = replace(first.recipe, spec=SourceSpec(name, "").pin())
    stored = _open_stored(config, recipe, cache, None)
    return ExampleSource(recipe, stored, np.ones(len(stored), np.bool_))


def _open_stored(
    config: DataConfig, recipe: Recipe, cache: Path, progress: Callable[[BuildProgress], None] | None
) -> StoredExamples:
    stored = StoredExamples(build_in_cache(config, "examples", ExampleInputs(recipe), cache, progress))
    if unused := stored.manifest.counts.unused:
        listed = ", ".join(f"{name} ({count:,} records)" for name, count in unused.items())
        _log.info("data.source %s: not used: %s", recipe.spec.name, listed)
    if reasoning := sum(count for name, count in unused.items() if name.endswith(END_OF_REASONING)):
        _log.warning(
            "data.source %s: the chat template leaves out the reasoning of %s, which is not learned: give "
            "data.examples.chat.template a template that writes it",
            recipe.spec.name,
            pluralize(reasoning, "record"),
        )
    return stored


def _find_held_back_examples(config: DataConfig, stored: StoredExamples) -> NDArray[np.bool_]:
    validation, number = config.validation, len(stored)
    if validation is None or validation.fraction is None:
        return np.zeros(number, np.bool_)
    if validation.split is ValidationSplit.TAIL:
        width = config.rows_per_sample
        return np.arange(number) // width >= int(number // width * (1 - validation.fraction))
    return select_held_back(stored.records, validation.fraction)


def _compute_identity(
    config: DataConfig, sources: Sequence[ExampleSource], tokenizer: Path, epoch_batch: int | None
) -> str:
    """Return a digest of everything on which the stream of samples depends.

    The digests of the encoded examples cover their inputs (records, templates, filter, loss, function).
    """
    validation = config.validation
    fraction = validation.fraction if validation is not None else None
    facts = {
        "format": FORMAT,
        "examples": [source.stored.manifest.identity for source in sources],
        "tokenizer": hash_tokenizer(tokenizer),
        "weights": [source.recipe.spec.weight for source in sources],
        "validation": [fraction, validation.split] if validation is not None and fraction is not None else None,
        "packing": config.examples.packing,
        "masks": config.masked,
        "epochs": epoch_batch,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _report(config: DataConfig, sources: Sequence[ExampleSource], training: Samples) -> DataReport:
    manifests, width = [source.stored.manifest for source in sources], config.rows_per_sample
    counts = RecordCounts()
    for manifest in manifests:
        counts.add(manifest.counts)
    return DataReport(
        counts=counts,
        examples=sum(manifest.documents for manifest in manifests) // width,
        held_back=sum(int(source.held_back.sum()) for source in sources) // width,
        skipped=sum(manifest.skipped for manifest in manifests),
        sequences=training.num_samples * width,
        tokens=sum(int(sample_source.input_lengths.sum()) for sample_source in training.sources),
        sequence_length=config.sequence_length,
        lengths=np.concatenate([source.stored.original_lengths for source in sources]),
    )
