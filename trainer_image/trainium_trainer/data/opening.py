"""Open the data of a configuration: every rank's first act, before it touches a device.

Guarantees:
- All that can be wrong with the data is found here, or is counted while training.
- Every rank that reads the same data under the same configuration gets the same identity.
- What is held back for validation is never trained on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.data import BosToken, DataConfig, Tokenization, ValidationSplit
from trainium_contract.trainer.examples import DataFormat
from trainium_trainer.data.batches.order import Mixture
from trainium_trainer.data.batches.samples import SampleRules, Samples, TextPart, ValidationSet, refuse_weights
from trainium_trainer.data.examples.opening import DataReport, open_examples
from trainium_trainer.data.examples.recipe import build_recipe
from trainium_trainer.data.online.streams import Streams, open_streams
from trainium_trainer.data.prepared.cache import find_validation_source, list_sources, prepared_folder, with_cache
from trainium_trainer.data.prepared.origins import (
    Origin,
    TextTokenizer,
    check_beginnings,
    check_tokenizers,
    find_origins,
    find_text_tokenizer,
    open_tokens,
)
from trainium_trainer.data.prepared.prepared import Prepared, Selection, Stretch
from trainium_trainer.data.sources.files import is_in_store
from trainium_trainer.data.sources.hub import pin_revision
from trainium_trainer.data.sources.resolve import SourceSpec
from trainium_trainer.data.tokens.tokenizer import (
    count_entries,
    digest_of,
    find_beginning_of_documents,
    find_end_of_document,
    load_tokenizer,
    tokenizer_file,
)
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainium_trainer.data.prepared.build import BuildProgress

_WORTH_STREAMS = 256 << 20
"""Bytes of text from which it is tokenized while training, unless the configuration decides."""


@dataclass(frozen=True, slots=True)
class Data:
    """Open data."""

    training: Samples | Streams
    validation: ValidationSet | None
    identity: str
    """Digest of the stream of samples: equal on all ranks that read the same data."""
    tokenizer: Path
    """The `tokenizer.json` of these tokens."""
    report: DataReport | None = None
    """Counts of the records; None for data.format Text, which has none."""

    @property
    def epoch_samples(self) -> int | None:
        """Samples of one epoch, rounded up to the global batch; None where epochs are not counted."""
        return self.training.epoch_samples

    @property
    def fingerprint(self) -> int:
        """The identity as a 62-bit number, to compare among ranks."""
        return int(self.identity[:16], 16) >> 2


def open_data(
    config: DataConfig,
    global_size: int,
    *,
    epochs: float = 0.0,
    steps_differ: bool = False,
    progress: Callable[[BuildProgress], None] | None = None,
) -> Data:
    """Open the data for batches of `global_size` samples; what is needed and not in the cache is tokenised first.

    With `epochs` each epoch has every sample of all sources once, and ends with a full batch; their number does not
    matter, only whether they are counted. Where `steps_differ` in their samples an epoch is filled up with nothing,
    and nothing is tokenised while training, where a step is one sample of each stream. `progress` replaces the log of
    a long build.

    Where the cache folder cannot be used, what it does not have is made again on this node's disk. Raises UserError for
    unusable data, StorageError for a store that is full or fails.
    """
    filled = 1 if steps_differ else global_size
    if config.format is not DataFormat.TEXT:
        made = with_cache(config, lambda cache: open_examples(config, cache, filled, epochs=epochs, progress=progress))
        return Data(made.training, made.validation, made.identity, made.tokenizer, made.report)

    def open_text(cache: Path) -> Data:
        origins = find_origins(config, cache)
        texts = find_text_tokenizer(config, origins, cache)
        tokenizer = texts.file
        rules = SampleRules(
            sequence_length=config.sequence_length,
            vocabulary=count_entries(tokenizer),
            end_of_document=find_end_of_document(tokenizer) if config.mask_documents else None,
        )
        training: Samples | Streams
        if _tokenizes_online(config, origins, epochs=epochs > 0, steps_differ=steps_differ):
            training, held, facts = open_streams(config, origins, texts, cache, rules, global_size)
        else:
            whole = [open_tokens(config, origin, texts, cache, progress) for origin in origins]
            kept, held = _divided(config, origins, whole, cache)
            batch = filled if epochs else None
            training = _samples(config, kept, rules, [origin.weight for origin in origins], batch)
            facts = {"tokens": [prepared.manifest.identity for prepared in whole]}
            if batch is not None:
                facts["epochs"] = batch
        validation = _validation(config, origins, held, rules, texts, cache)
        return Data(training, validation, _identity(config, facts, origins, tokenizer), tokenizer)

    return with_cache(config, open_text)


def refuse_unusable(config: DataConfig) -> None:
    """Raise UserError for what opening the data refuses before it reads a record; nothing is made or imported."""
    if config.tokenizer.path is None:
        return
    file = tokenizer_file(config.tokenizer)
    if config.format is DataFormat.TEXT:
        find_end_of_document(file)
        find_beginning_of_documents(config.bos, file)
        return
    for name, _, _ in list_sources(config):
        if not is_in_store(name):
            recipe = build_recipe(config, name, file)
            if config.format is DataFormat.FUNCTION:
                recipe.key_of_function()
            else:
                recipe.maker(())


def text_prompt_ids(config: DataConfig, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Encode texts that are to be continued; they begin as documents do in training. Format Text.

    Empty ones with data.bos `Auto`, where the model's own tokenizer decides how a text begins. Raises UserError or
    StorageError.
    """
    if config.bos is BosToken.AUTO:
        return [()] * len(texts)
    known = with_cache(config, lambda cache: find_text_tokenizer(config, find_origins(config, cache), cache))
    tokenizer = load_tokenizer(known.file)
    tokenizer.encode_special_tokens = False  # a prompt may have them
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [tuple(known.beginning.prepend_to(one.ids)[0]) for one in encoded]


def _tokenizes_online(
    config: DataConfig, origins: Sequence[Origin], *, epochs: bool = False, steps_differ: bool = False
) -> bool:
    """Return whether data are tokenized while training. Raises UserError when they are to be and cannot."""
    texts = [origin.spec.source for origin in origins if origin.prepared is None]
    if not texts or config.tokenization is Tokenization.AHEAD:
        return False
    if config.tokenization is Tokenization.ONLINE:
        if epochs:
            raise UserError(
                "data.tokenization is Online, which does not know where an epoch ends: set it to Ahead, or set steps "
                "in place of epochs"
            )
        for origin, text in zip((one for one in origins if one.prepared is None), texts, strict=True):
            if not text.size and not text.divisible:  # of unknown length, and read from its beginning only
                raise UserError(
                    f"data.source {origin.spec.name}: cannot be tokenised while training: set data.tokenization to "
                    "Ahead, or prepare the data"
                )
        return True
    if epochs or steps_differ:
        return False
    return all(text.divisible for text in texts) and sum(text.size for text in texts) >= _WORTH_STREAMS


def _identity(config: DataConfig, facts: dict[str, Any], origins: Sequence[Origin], tokenizer: Path) -> str:
    """Return the identity of a whole source's tokens; else a digest of all that the stream of samples depends on."""
    held = config.validation
    fraction = held.fraction if held is not None else None
    if list(facts) == ["tokens"] and len(origins) == 1 and fraction is None and not config.mask_documents:
        return str(facts["tokens"][0])
    facts |= {
        "tokenizer": digest_of(tokenizer),
        "weights": [origin.weight for origin in origins],
        "validation": [fraction, held.split] if held is not None and fraction is not None else None,
        "maskDocuments": config.mask_documents,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _divided(
    config: DataConfig, origins: Sequence[Origin], whole: Sequence[Prepared], cache: Path
) -> tuple[list[TextPart], list[TextPart]]:
    """Divide the sources into training and validation."""
    parts = [TextPart(origin.spec.name, prepared) for origin, prepared in zip(origins, whole, strict=True)]
    held = config.validation
    if held is None or held.fraction is None:
        return parts, []
    if held.split is ValidationSplit.TAIL:
        marks = [int(prepared.tokens * (1 - held.fraction)) for prepared in whole]
        cut = list(zip(origins, whole, marks, strict=True))
        kept = [TextPart(origin.spec.name, Stretch(prepared, 0, mark)) for origin, prepared, mark in cut]
        tails = [TextPart(origin.spec.name, Stretch(prepared, mark, prepared.tokens)) for origin, prepared, mark in cut]
        return kept, tails

    def chosen(part: TextPart, prepared: Prepared, *, validation: bool) -> TextPart:
        assert held is not None
        assert held.fraction is not None
        return TextPart(part.name, Selection(prepared, held.fraction, validation=validation, memo=cache))

    pairs = list(zip(parts, whole, strict=True))
    return [chosen(*pair, validation=False) for pair in pairs], [chosen(*pair, validation=True) for pair in pairs]


def _samples(
    config: DataConfig, parts: list[TextPart], rules: SampleRules, weights: list[float], batch: int | None
) -> Samples:
    if batch is not None:
        refuse_weights(weights)
    for part in parts:
        if part.run.tokens - 1 < config.sequence_length:
            raise UserError(
                f"data.source {part.name}: holds {part.run.tokens} tokens to train on, fewer than one sequence of "
                f"{config.sequence_length} and its next token: add text or lower data.sequenceLength"
            )
    return Samples(parts, Mixture(weights, config.seed), seed=config.seed, rules=rules, epoch_batch=batch)


def _validation(
    config: DataConfig,
    origins: Sequence[Origin],
    parts: list[TextPart],
    rules: SampleRules,
    texts: TextTokenizer,
    cache: Path,
) -> ValidationSet | None:
    """Return the samples of a measurement: the first ones of each source, by its share."""
    held = config.validation
    if held is None:
        return None
    weights = [origin.weight for origin in origins]
    if (source := find_validation_source(config)) is not None:
        origin = Origin(SourceSpec(pin_revision(source), config.text_field), 1.0, prepared_folder(source, cache))
        check_tokenizers(texts.file, [origin])
        check_beginnings(config, [origin])
        parts, weights = [TextPart(source, open_tokens(config, origin, texts, cache))], [1.0]
    for part in parts:
        if part.run.tokens < 2:
            raise UserError(
                f"data.validation: {part.name} has no document to hold back: raise data.validation.fraction, set "
                "data.validation.split to Tail, or give data.validation.source"
            )
    return ValidationSet(Samples(parts, Mixture(weights, config.seed), seed=config.seed, rules=rules), held.samples)
