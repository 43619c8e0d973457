"""Find the sources of a configuration, as prepared data or text, with their tokenizer.

Guarantees:
- A folder in the cache is named by a digest of its inputs and published by one rename.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainium_contract.trainer.data import BosToken, DataConfig
from trainium_trainer.data.prepared.build import BuildInputs, BuildProgress, build_in_cache
from trainium_trainer.data.prepared.reader import FORMAT, PreparedData, PreparedManifest, is_prepared, read_manifest
from trainium_trainer.data.prepared.s3_copy import copy_from_s3
from trainium_trainer.data.sources.files import S3
from trainium_trainer.data.sources.resolve import SourceSpec, list_sources
from trainium_trainer.data.tokens.encoding import DocumentEncoder, train_for_texts
from trainium_trainer.data.tokens.special_tokens import NO_BOS_PREFIX, BosPrefix, find_document_bos_prefix
from trainium_trainer.data.tokens.tokenizer import (
    TOKENIZER_FILE,
    count_entries,
    end_facts,
    find_tokenizer_file,
    hash_tokenizer,
    write_tokenizer,
)
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def find_prepared_folder(name: str, cache: Path) -> Path | None:
    """Return the folder of prepared data of a source; None for other sources."""
    if not name.startswith(S3):
        folder = Path(name).expanduser()
        return folder if is_prepared(folder) else None
    return copy_from_s3(name, cache)


@dataclass(frozen=True)
class TextInputs(BuildInputs):
    """Text and its tokenizer."""

    specs: tuple[SourceSpec, ...]
    tokenizer: Path
    max_bad_lines: int | None
    bos_prefix: BosPrefix = NO_BOS_PREFIX
    block_bytes: ClassVar = 4 << 20
    shard_tokens: ClassVar = 64 << 20

    def compute_key(self, cache_folder: Path | None) -> str:
        """See `BuildInputs.compute_key`."""
        parts: list[Any] = [
            FORMAT,
            hash_tokenizer(self.tokenizer),
            [spec.source.compute_identity(cache_folder) for spec in self.specs],
            *self.list_selection(),
        ]
        if facts := self.bos_prefix.list_settings():
            parts.append({"bos": facts})
        if end := end_facts(self.tokenizer):
            parts.append(end)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def list_selection(self) -> list[Any]:
        """Return what selects a part of the text, as JSON values; empty for the whole text."""
        return []

    def create_encoder(self) -> DocumentEncoder:
        """See `BuildInputs.create_encoder`."""
        return DocumentEncoder(self.tokenizer, self.bos_prefix)

    def refuse_empty(self, manifest: PreparedManifest) -> None:
        """See `BuildInputs.refuse_empty`."""
        if manifest.tokens:
            return
        skipped = (
            f" ({manifest.skipped} lines were skipped, the first: {manifest.examples[0]})" if manifest.examples else ""
        )
        raise UserError(f"data.source {self.name}: holds no text{skipped}: give a source with text in it")

    def count_records(self, manifest: PreparedManifest) -> int | None:
        """See `BuildInputs.count_records`."""
        return None if any(spec.source.has_lines for spec in self.specs) else manifest.documents + manifest.skipped

    def list_files(self) -> Mapping[str, str]:
        """Return the files of the tokenizer."""
        return write_tokenizer(self.tokenizer)


@dataclass(frozen=True, slots=True)
class TextSource:
    """A source as prepared data or as text."""

    spec: SourceSpec
    prepared: Path | None
    """The folder of prepared data; None for text."""


@dataclass(frozen=True, slots=True)
class TextSources:
    """The sources of a configuration, and the tokenizer that all of them share."""

    config: DataConfig
    cache: Path
    sources: tuple[TextSource, ...]
    tokenizer: Path
    """The `tokenizer.json`."""
    bos_prefix: BosPrefix
    """The tokens before each document."""

    @staticmethod
    def open(config: DataConfig, cache: Path) -> TextSources:
        """Find sources and tokenizer, which is trained if there is none. Raises UserError or StorageError."""
        sources = tuple(TextSource(spec.pin(), find_prepared_folder(spec.name, cache)) for spec in list_sources(config))
        prepared = [text_source.prepared for text_source in sources if text_source.prepared is not None]
        if config.tokenizer.path is not None:
            file = find_tokenizer_file(config.tokenizer)
            count_entries(file)
        elif prepared:
            file = prepared[0] / TOKENIZER_FILE
        else:
            file = train_for_texts([text_source.spec for text_source in sources], config.tokenizer.vocab_size, cache)
        bos_tokens = [check_prepared_source(config, source, file) for source in sources if source.prepared is not None]
        if config.bos is BosToken.ALWAYS and bos_tokens:  # tokenizer.json alone may not name the token
            bos_prefix = BosPrefix(config.bos, bos_tokens[0])
        else:
            bos_prefix = find_document_bos_prefix(config.bos, file)
        return TextSources(config, cache, sources, file, bos_prefix)

    @property
    def weights(self) -> list[float]:
        """Weight of each source."""
        return [text_source.spec.weight for text_source in self.sources]

    def open_tokens(
        self, text_source: TextSource, progress: Callable[[BuildProgress], None] | None = None
    ) -> PreparedData:
        """Open all tokens of a source; build them if they are missing. Raises UserError or StorageError."""
        if text_source.prepared is not None:
            return PreparedData(text_source.prepared)
        inputs = TextInputs((text_source.spec,), self.tokenizer, self.config.max_bad_lines, self.bos_prefix)
        return PreparedData(build_in_cache(self.config, "tokens", inputs, self.cache, progress))

    def open_validation_source(self, name: str) -> PreparedData:
        """Return all tokens of the separate source of `data.validation`. Raises UserError or StorageError."""
        spec = SourceSpec(name, self.config.text_field).pin()
        text_source = TextSource(spec, find_prepared_folder(name, self.cache))
        if text_source.prepared is not None:
            check_prepared_source(self.config, text_source, self.tokenizer)
        return self.open_tokens(text_source)


def check_prepared_source(config: DataConfig, text_source: TextSource, tokenizer: Path) -> tuple[int, ...]:
    """Return the BOS tokens of a prepared source.

    Raises UserError if it was prepared with another tokenizer, or `data.bos` demands others.
    """
    assert text_source.prepared is not None
    manifest = read_manifest(text_source.prepared)
    if manifest.tokenizer != hash_tokenizer(tokenizer):
        raise UserError(
            f"data.source {text_source.spec.name}: was prepared with another tokenizer than {tokenizer}: leave out "
            "data.tokenizer.path, or prepare the data with that tokenizer"
        )
    bos_tokens = manifest.bos_tokens
    if config.bos is not BosToken.AUTO and (config.bos is BosToken.ALWAYS) != bool(bos_tokens):
        how = "with" if bos_tokens else "without"
        raise UserError(
            f"data.source {text_source.spec.name}: was prepared {how} BOS tokens, but data.bos is {config.bos}: leave "
            f"out data.bos, or prepare the data again with prepare-data --bos {config.bos}"
        )
    return bos_tokens
