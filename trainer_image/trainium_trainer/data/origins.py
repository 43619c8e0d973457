"""The sources of a configuration, each as prepared data or as text, and the tokenizer that all of them have."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_trainer.data.build import HeldBack, Progress, Recipe, build
from trainium_trainer.data.cache import prepared_folder, sources_of
from trainium_trainer.data.encoding import SourceSpec
from trainium_trainer.data.learning import learned
from trainium_trainer.data.prepared import Prepared, read_manifest
from trainium_trainer.data.tokenizer import TOKENIZER_FILE, digest_of, tokenizer_file, vocabulary_of
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainium_contract.trainer_data import DataConfig

_log = logging.getLogger("trainium.data")
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, slots=True)
class Origin:
    """One source."""

    spec: SourceSpec
    weight: float
    prepared: Path | None
    """Its folder when it is prepared already; None for text."""


def origins_of(config: DataConfig, cache: Path) -> list[Origin]:
    """What is trained on. Raises UserError or StorageError."""
    return [
        Origin(SourceSpec(name, field), weight, prepared_folder(name, cache))
        for name, field, weight in sources_of(config)
    ]


def shared_tokenizer(config: DataConfig, origins: Sequence[Origin], cache: Path) -> Path:
    """The tokenizer's file, trained when there is none; all that is prepared must have been prepared with it."""
    prepared = [origin.prepared for origin in origins if origin.prepared is not None]
    if config.tokenizer.path is not None:
        file = tokenizer_file(config.tokenizer)
        vocabulary_of(file)
    elif prepared:
        file = prepared[0] / TOKENIZER_FILE
    else:
        return learned([origin.spec for origin in origins], config.tokenizer.vocab_size, cache)
    same_tokenizer(file, origins)
    return file


def same_tokenizer(file: Path, origins: Sequence[Origin]) -> None:
    """Refuse what was prepared with another tokenizer. Raises UserError."""
    for origin in origins:
        if origin.prepared is not None and read_manifest(origin.prepared).tokenizer != digest_of(file):
            raise UserError(
                f"data.source {origin.spec.name}: was prepared with another tokenizer than {file}: leave out "
                "data.tokenizer.path, or prepare the data with that tokenizer"
            )


def tokens_of(config: DataConfig, origin: Origin, tokenizer: Path, cache: Path) -> Prepared:
    """All tokens of a source, made when they are not there yet. Raises UserError or StorageError."""
    if origin.prepared is not None:
        return Prepared(origin.prepared)
    return built(config, Recipe((origin.spec,), tokenizer, config.max_bad_lines), cache)


def held_back_of(config: DataConfig, origin: Origin, tokenizer: Path, held: HeldBack, cache: Path) -> Prepared:
    """Some of what is held back of a text. Raises UserError or StorageError."""
    return built(config, Recipe((origin.spec,), tokenizer, config.max_bad_lines, held), cache)


def built(config: DataConfig, recipe: Recipe, cache: Path) -> Prepared:
    """The result of a recipe, from the cache if it is there."""
    key = recipe.key(cache)
    folder = cache / f"tokens-{key[:32]}"
    manifest = build(folder, recipe, key, workers=config.workers, progress=_Lines(recipe.name))
    if manifest.skipped:
        _log.warning(
            "data.source %s: skipped %d lines, the first: %s", recipe.name, manifest.skipped, manifest.examples[0]
        )
    return Prepared(folder)


class _Lines:
    """Tells the log of a long build now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            share = 100 * progress.bytes / max(1, progress.total_bytes)
            _log.info("tokenising %s: %.0f %%, %d tokens", self._name, share, progress.tokens)
