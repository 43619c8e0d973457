"""Find the sources of a configuration, each as prepared data or as text, and the tokenizer that all of them share.

Guarantees:
- A tokenizer is trained once per machine, sources and vocabulary size, and its file is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.data import BosToken, DataConfig
from trainium_trainer.data.prepared.build import BuildProgress, HeldBack, PreparedRecipe, build, hold_lock
from trainium_trainer.data.prepared.cache import list_sources, prepared_folder
from trainium_trainer.data.prepared.prepared import Prepared, read_manifest
from trainium_trainer.data.sources.documents import DocumentSource, TextPiece
from trainium_trainer.data.sources.hub import pin_revision
from trainium_trainer.data.sources.resolve import SourceSpec
from trainium_trainer.data.tokens.tokenizer import (
    AS_IT_IS,
    TOKENIZER_FILE,
    BosPrefix,
    count_entries,
    digest_of,
    find_beginning_of_documents,
    tokenizer_file,
    train_tokenizer,
)
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


_FORMAT = 1
_BLOCK_BYTES = 4 << 20


def train_for_texts(specs: Sequence[SourceSpec], vocab_size: int, cache: Path) -> Path:
    """Return the `tokenizer.json` of a tokenizer for these sources. Raises UserError, StorageError, WorkerError."""
    parts = [_FORMAT, vocab_size, [spec.source.identity(cache) for spec in specs]]
    return train_once(parts, cache, _learn, tuple(specs), vocab_size)


def train_once(parts: list[Any], cache: Path, learn: Callable[..., None], *arguments: Any) -> Path:
    """Return the file that `learn(*arguments, file)` writes in a process, unless the cache has one for `parts`."""
    folder = cache / f"tokenizer-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"
    file = folder / TOKENIZER_FILE
    if file.exists():
        return file
    with hold_lock(cache / f".{folder.name}.lock"):
        if not file.exists():
            folder.mkdir(exist_ok=True)
            temporary = folder / "unfinished.json"
            with Workers(1) as workers:
                workers.call(learn, *arguments, str(temporary))
            temporary.rename(file)
    return file


def _learn(specs: tuple[SourceSpec, ...], vocab_size: int, file: str) -> None:
    """Train and save; called in a child process, whose memory and threads end with it."""
    train_tokenizer([_texts(spec.source) for spec in specs], vocab_size).save(file)


def _texts(source: DocumentSource) -> Iterator[str]:
    for block in source.blocks(_BLOCK_BYTES):
        yield from (item.text for item in source.all_documents(block) if isinstance(item, TextPiece))


_log = logging.getLogger("trainium.data")
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, slots=True)
class Origin:
    """One source."""

    spec: SourceSpec
    weight: float
    prepared: Path | None
    """Its folder when it is prepared already; None for text."""


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """Tokenizer of documents, and their beginning."""

    file: Path
    """The `tokenizer.json`."""
    beginning: BosPrefix = AS_IT_IS


def find_origins(config: DataConfig, cache: Path) -> list[Origin]:
    """Return the sources. Raises UserError or StorageError."""
    return [
        Origin(SourceSpec(pin_revision(name), field), weight, prepared_folder(name, cache))
        for name, field, weight in list_sources(config)
    ]


def find_text_tokenizer(config: DataConfig, origins: Sequence[Origin], cache: Path) -> TextTokenizer:
    """Return the tokenizer of all sources, and how it lets documents begin. Raises UserError or StorageError."""
    file = find_shared_tokenizer(config, origins, cache)
    marks = check_beginnings(config, origins)
    if config.bos is BosToken.ALWAYS and marks:  # the folder's tokenizer.json alone may not name the token
        return TextTokenizer(file, BosPrefix(config.bos, marks[0]))
    return TextTokenizer(file, find_beginning_of_documents(config.bos, file))


def check_beginnings(config: DataConfig, origins: Sequence[Origin]) -> list[tuple[int, ...]]:
    """Return the BOS tokens of the prepared sources. Raises UserError where `data.bos` demands others."""
    marks = []
    for origin in origins:
        if origin.prepared is None:
            continue
        mark = read_manifest(origin.prepared).beginning
        if config.bos is not BosToken.AUTO and (config.bos is BosToken.ALWAYS) != bool(mark):
            how = "with" if mark else "without"
            raise UserError(
                f"data.source {origin.spec.name}: was prepared {how} BOS tokens, but data.bos is {config.bos}: leave "
                f"out data.bos, or prepare the data again with prepare-data --bos {config.bos}"
            )
        marks.append(mark)
    return marks


def find_shared_tokenizer(config: DataConfig, origins: Sequence[Origin], cache: Path) -> Path:
    """Return the tokenizer's file, trained when there is none. Raises UserError for data prepared with another."""
    prepared = [origin.prepared for origin in origins if origin.prepared is not None]
    if config.tokenizer.path is not None:
        file = tokenizer_file(config.tokenizer)
        count_entries(file)
    elif prepared:
        file = prepared[0] / TOKENIZER_FILE
    else:
        return train_for_texts([origin.spec for origin in origins], config.tokenizer.vocab_size, cache)
    check_tokenizers(file, origins)
    return file


def check_tokenizers(file: Path, origins: Sequence[Origin]) -> None:
    """Refuse what was prepared with another tokenizer. Raises UserError."""
    for origin in origins:
        if origin.prepared is not None and read_manifest(origin.prepared).tokenizer != digest_of(file):
            raise UserError(
                f"data.source {origin.spec.name}: was prepared with another tokenizer than {file}: leave out "
                "data.tokenizer.path, or prepare the data with that tokenizer"
            )


def open_tokens(
    config: DataConfig,
    origin: Origin,
    tokenizer: TextTokenizer,
    cache: Path,
    progress: Callable[[BuildProgress], None] | None = None,
) -> Prepared:
    """All tokens of a source, made when they are not there yet. Raises UserError or StorageError."""
    if origin.prepared is not None:
        return Prepared(origin.prepared)
    recipe = PreparedRecipe((origin.spec,), tokenizer.file, config.max_bad_lines, beginning=tokenizer.beginning)
    return build_in_cache(config, recipe, cache, progress)


def open_held_back(
    config: DataConfig, origin: Origin, tokenizer: TextTokenizer, held: HeldBack, cache: Path
) -> Prepared:
    """Tokenize a part of the text that is held back. Raises UserError or StorageError."""
    recipe = PreparedRecipe((origin.spec,), tokenizer.file, config.max_bad_lines, held, tokenizer.beginning)
    return build_in_cache(config, recipe, cache)


def build_in_cache(
    config: DataConfig, recipe: PreparedRecipe, cache: Path, progress: Callable[[BuildProgress], None] | None = None
) -> Prepared:
    """Build the folder of a recipe, unless the cache has it."""
    key = recipe.key(cache)
    folder = cache / f"tokens-{key[:32]}"
    manifest = build(folder, recipe.inputs(), key, workers=config.workers, progress=progress or Lines(recipe.name))
    if manifest.skipped:
        _log.warning(
            "data.source %s: skipped %d lines, the first: %s", recipe.name, manifest.skipped, manifest.examples[0]
        )
    return Prepared(folder)


class Lines:
    """Logs the progress of a long build now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = time.monotonic()

    def __call__(self, progress: BuildProgress) -> None:
        """Log the progress, unless it was logged just now."""
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            share = 100 * progress.bytes / max(1, progress.total_bytes)
            _log.info("tokenising %s: %.0f %%, %d tokens", self._name, share, progress.tokens)
