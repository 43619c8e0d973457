"""Open the data of a configuration, which every rank does first, before it uses a device.

Guarantees:
- Every problem of the data is found here, or counted during training.
- Every rank that reads the same data under the same configuration gets the same identity.
- Data held back for validation are never used in training.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.data import BosToken, DataConfig, Tokenization, ValidationSplit
from trainium_contract.trainer.examples import DataFormat
from trainium_trainer.data.batches.samples import (
    SampleRules,
    Samples,
    TextSampleSource,
    TokenSequence,
    ValidationSet,
    refuse_weights,
)
from trainium_trainer.data.cache import run_with_cache
from trainium_trainer.data.examples.dataset import DataReport, open_examples
from trainium_trainer.data.examples.recipe import build_recipe
from trainium_trainer.data.online.streams import Streams, open_streams
from trainium_trainer.data.prepared.reader import DocumentSelection, PreparedData, TokenRange
from trainium_trainer.data.prepared.text_sources import TextSources
from trainium_trainer.data.sources.files import is_in_store
from trainium_trainer.data.sources.resolve import find_validation_source, list_sources
from trainium_trainer.data.tokens.special_tokens import find_document_bos_prefix
from trainium_trainer.data.tokens.tokenizer import (
    CHAT_TEMPLATE_SETTING,
    count_entries,
    find_end_of_document,
    find_tokenizer_file,
    hash_tokenizer,
    load_tokenizer,
)
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.data.prepared.build import BuildProgress

_WORTH_STREAMS = 256 << 20
"""The bytes of text from which on it is tokenized during training, unless the configuration decides."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The open data of a run."""

    training: Samples | Streams
    validation: ValidationSet | None
    identity: str
    """The digest of the stream of samples: equal on all ranks that read the same data."""
    tokenizer: Path
    """The `tokenizer.json` of the tokens."""
    report: DataReport | None = None
    """The counts of the records; None for data.format Text, which has none."""
    chat_template: str | None = None
    """The text of data.examples.chat.template; None if the tokenizer's templates are used."""

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a run for those who use its model."""
        return {} if self.chat_template is None else {CHAT_TEMPLATE_SETTING: self.chat_template}

    @property
    def epoch_samples(self) -> int | None:
        """The samples of one epoch, rounded up to the global batch; None if epochs are not counted."""
        return self.training.epoch_samples

    @property
    def fingerprint(self) -> int:
        """The identity as a 62-bit number, to compare between ranks."""
        return int(self.identity[:16], 16) >> 2


def open_data(
    config: DataConfig,
    global_size: int,
    *,
    epochs: float = 0.0,
    steps_differ: bool = False,
    progress: Callable[[BuildProgress], None] | None = None,
) -> Dataset:
    """Open the data for batches of `global_size` samples; tokenize missing data into the cache first.

    With `epochs` each epoch has every sample of all sources once, and ends with a full batch; only whether epochs are
    counted matters, not their number. If `steps_differ` in size, epochs are not padded, and text is not tokenized
    during training, where a step is one sample of each stream. `progress` replaces the log of a long build. If the
    cache folder cannot be used, missing data are built on this node's disk. Raises UserError for unusable data,
    StorageError for a store that is full or fails.
    """
    epoch_batch = None
    if epochs:
        epoch_batch = 1 if steps_differ else global_size
    if config.format is not DataFormat.TEXT:
        return run_with_cache(config, lambda cache: _open_records(config, cache, epoch_batch, progress))

    def open_text(cache: Path) -> Dataset:
        texts = TextSources.open(config, cache)
        if _is_tokenized_online(texts, epochs=epochs > 0, steps_differ=steps_differ):
            streams, held_back, facts = open_streams(texts, _create_rules(texts), global_size)
            return _create_text_dataset(texts, streams, held_back, facts)
        tokens = [texts.open_tokens(text_source, progress) for text_source in texts.sources]
        sources, held_back = _divide(texts, tokens)
        facts = {"tokens": [prepared.manifest.identity for prepared in tokens]}
        if epoch_batch is not None:
            facts["epochs"] = epoch_batch
        return _create_text_dataset(texts, _build_samples(texts, sources, epoch_batch), held_back, facts)

    return run_with_cache(config, open_text)


def _open_records(
    config: DataConfig, cache: Path, epoch_batch: int | None, progress: Callable[[BuildProgress], None] | None
) -> Dataset:
    """Open records as examples."""
    examples = open_examples(config, cache, epoch_batch, progress)
    template = None
    if config.examples.chat.template is not None:
        template = examples.sources[0].recipe.chat_templates.default
    return Dataset(
        examples.training, examples.validation, examples.identity, examples.tokenizer, examples.report, template
    )


def _create_rules(texts: TextSources) -> SampleRules:
    config, tokenizer = texts.config, texts.tokenizer
    return SampleRules(
        sequence_length=config.sequence_length,
        vocabulary=count_entries(tokenizer),
        end_of_document=find_end_of_document(tokenizer) if config.mask_documents else None,
    )


def _create_text_dataset(
    texts: TextSources, training: Samples | Streams, held_back: list[TextSampleSource], facts: dict[str, Any]
) -> Dataset:
    """Return the dataset of a text; `facts` determine the training samples."""
    validation = _build_validation(texts, held_back, training.rules)
    return Dataset(training, validation, _compute_identity(texts, facts), texts.tokenizer)


def open_run_data(config: TrainingConfig, progress: Callable[[BuildProgress], None] | None = None) -> Dataset:
    """Open the data of a run, see `open_data`."""
    return open_data(
        config.data,
        config.batch.global_size,
        epochs=config.epochs,
        steps_differ=config.batch.tolerance > 0,
        progress=progress,
    )


def refuse_unusable(config: DataConfig) -> None:
    """Raise the UserErrors of opening the data that need no record; build and import nothing."""
    if config.tokenizer.path is None:
        return
    file = find_tokenizer_file(config.tokenizer)
    if config.format is DataFormat.TEXT:
        find_end_of_document(file)
        find_document_bos_prefix(config.bos, file)
        return
    for spec in list_sources(config):
        if not is_in_store(spec.name):
            recipe = build_recipe(config, spec, file)
            if config.format is DataFormat.FUNCTION:
                recipe.compute_function_key()
            else:
                recipe.record_format(())


def encode_text_prompts(config: DataConfig, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Encode texts to continue, with the BOS prefix of documents in training. Format Text.

    Empty with data.bos `Auto`, where the model's tokenizer decides how a text begins. Raises UserError or StorageError.
    """
    if config.bos is BosToken.AUTO:
        return [()] * len(texts)
    sources = run_with_cache(config, lambda cache: TextSources.open(config, cache))
    tokenizer = load_tokenizer(sources.tokenizer)
    tokenizer.encode_special_tokens = False  # a prompt may contain special tokens
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [tuple(sources.bos_prefix.prepend_to(encoding.ids)[0]) for encoding in encoded]


def _is_tokenized_online(texts: TextSources, *, epochs: bool, steps_differ: bool) -> bool:
    """Return whether data are tokenized during training. Raises UserError if that is configured but impossible."""
    specs = [text_source.spec for text_source in texts.sources if text_source.prepared is None]
    tokenization = texts.config.tokenization
    if not specs or tokenization is Tokenization.AHEAD:
        return False
    if tokenization is Tokenization.ONLINE:
        if epochs:
            raise UserError(
                "data.tokenization is Online, which does not know where an epoch ends: set it to Ahead, or set steps "
                "in place of epochs"
            )
        for spec in specs:
            if not spec.source.size and not spec.source.divisible:  # read only from its beginning
                raise UserError(
                    f"data.source {spec.name}: cannot be tokenized while training: set data.tokenization to "
                    "Ahead, or prepare the data"
                )
        return True
    if epochs or steps_differ:
        return False
    return all(spec.source.divisible for spec in specs) and sum(spec.source.size for spec in specs) >= _WORTH_STREAMS


def _compute_identity(texts: TextSources, facts: dict[str, Any]) -> str:
    """Return the identity of a whole source's tokens, else a digest of everything that determines the samples."""
    config, validation = texts.config, texts.config.validation
    fraction = validation.fraction if validation is not None else None
    if list(facts) == ["tokens"] and len(texts.sources) == 1 and fraction is None and not config.mask_documents:
        return str(facts["tokens"][0])
    facts |= {
        "tokenizer": hash_tokenizer(texts.tokenizer),
        "weights": texts.weights,
        "validation": [fraction, validation.split] if validation is not None and fraction is not None else None,
        "maskDocuments": config.mask_documents,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _divide(
    texts: TextSources, tokens: Sequence[PreparedData]
) -> tuple[list[TextSampleSource], list[TextSampleSource]]:
    """Divide the sources into training and validation."""
    names, validation = [text_source.spec.name for text_source in texts.sources], texts.config.validation
    if validation is None or validation.fraction is None:
        return list(map(TextSampleSource, names, tokens)), []
    training: list[TokenSequence] = []
    held_back: list[TokenSequence] = []
    for prepared in tokens:
        if validation.split is ValidationSplit.TAIL:
            end = int(prepared.tokens * (1 - validation.fraction))
            training.append(TokenRange(prepared, 0, end))
            held_back.append(TokenRange(prepared, end, prepared.tokens))
        else:
            for parts, validates in ((training, False), (held_back, True)):
                parts.append(
                    DocumentSelection(prepared, validation.fraction, validation=validates, cache_folder=texts.cache)
                )
    return list(map(TextSampleSource, names, training)), list(map(TextSampleSource, names, held_back))


def _build_samples(texts: TextSources, sources: list[TextSampleSource], epoch_batch: int | None) -> Samples:
    config, weights = texts.config, texts.weights
    if epoch_batch is not None:
        refuse_weights(weights)
    for source in sources:
        if source.sequence.tokens - 1 < config.sequence_length:
            raise UserError(
                f"data.source {source.name}: holds {source.sequence.tokens} tokens to train on, fewer than one "
                f"sequence of {config.sequence_length} and its next token: add text or lower data.sequenceLength"
            )
    return Samples(sources, weights, seed=config.seed, rules=_create_rules(texts), epoch_batch=epoch_batch)


def _build_validation(texts: TextSources, sources: list[TextSampleSource], rules: SampleRules) -> ValidationSet | None:
    """Return the samples of a validation: the first ones of each source, by its share."""
    config, validation, weights = texts.config, texts.config.validation, texts.weights
    if validation is None:
        return None
    if (name := find_validation_source(config)) is not None:
        sources, weights = [TextSampleSource(name, texts.open_validation_source(name))], [1.0]
    for source in sources:
        if source.sequence.tokens < 2:
            raise UserError(
                f"data.validation: {source.name} has no document to hold back: raise data.validation.fraction, set "
                "data.validation.split to Tail, or give data.validation.source"
            )
    return ValidationSet(Samples(sources, weights, seed=config.seed, rules=rules), validation.samples)
