"""Find the sources of a configuration in the machine's cache folder, as prepared data or text, with their tokenizer.

Guarantees:
- A folder in the cache is named by a digest of its inputs and published by one rename.
- Where the cache cannot be written, it is still read, and missing data are built on the node's disk.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from trainium_contract.trainer.data import BosToken, DataConfig
from trainium_contract.worker_process.write_access import FORBIDDEN, FULL, explain_forbidden
from trainium_trainer.data.prepared.build import BuildInputs, BuildProgress, build
from trainium_trainer.data.prepared.reader import FORMAT, PreparedData, PreparedManifest, is_prepared, read_manifest
from trainium_trainer.data.prepared.s3_copy import copy_from_s3
from trainium_trainer.data.sources.documents import FileBlock
from trainium_trainer.data.sources.files import S3
from trainium_trainer.data.sources.resolve import SourceSpec, list_sources, pin_source
from trainium_trainer.data.tokens.encoding import (
    TokenBlock,
    encode,
    initialize_worker,
    select_held_back,
    train_for_texts,
)
from trainium_trainer.data.tokens.tokenizer import (
    NO_BOS_PREFIX,
    TOKENIZER_FILE,
    BosPrefix,
    count_entries,
    end_facts,
    find_document_bos_prefix,
    find_tokenizer_file,
    hash_tokenizer,
    write_tokenizer,
)
from trainium_trainer.exits import StorageError, TrainerError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


BLOCK_BYTES = 4 << 20


T = TypeVar("T")

_log = logging.getLogger("trainium.data")
_SECONDS_BETWEEN_LINES = 10.0
_NOT_A_FOLDER = frozenset({errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG})


def find_cache_directory(config: DataConfig) -> Path:
    """Return the folder of tokenizers and tokens on this machine."""
    if config.cache_directory is not None:
        return Path(config.cache_directory).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home() may raise
    if os.access(base, os.W_OK) or os.access(Path(base).parent, os.W_OK):
        return Path(base) / "trainium-trainer"
    return _create_temporary_folder()


def run_with_cache(config: DataConfig, work: Callable[[Path], T]) -> T:
    """Run some work with the cache folder, or with a folder on this node's disk if the cache cannot be used.

    A read-only cache is still read. Raises UserError if the cache is not a folder, and the errors of the work.
    """
    cache = find_cache_directory(config)
    try:
        with use_cache(cache):
            return work(cache)
    except (UserError, StorageError) as error:
        cause, other = error.__cause__, _create_temporary_folder()
        if not isinstance(error, _CacheError) or getattr(cause, "errno", None) in _NOT_A_FOLDER or other == cache:
            raise
        _log.warning("%s; it is only a cache: what is not in it is made again in %s", error, other)
    with use_cache(other):
        return work(other)


class _CacheError(TrainerError):
    """An error of the cache, not of the data."""


class _ForbiddenCacheError(_CacheError, UserError):
    """The cache cannot be written, and a retry would not help."""


class _FailingCacheError(_CacheError, StorageError):
    """The cache is full or fails."""


def _create_temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"trainium-trainer-{os.getuid()}"


@contextmanager
def use_cache(cache: Path) -> Iterator[Path]:
    """Create the cache folder, and turn errors of the file system into errors of the cache."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        yield cache
    except OSError as error:
        kind = _ForbiddenCacheError if error.errno in FORBIDDEN | _NOT_A_FOLDER else _FailingCacheError
        if error.errno in FORBIDDEN:
            advice = f"{explain_forbidden(error.errno)}, or "
        elif error.errno in FULL:
            advice = "free space there or "
        else:
            advice = ""
        raise kind(
            f"data.cacheDirectory {cache}: cannot be used ({error.strerror or error}): "
            f"{advice}set data.cacheDirectory to a folder that can be written"
        ) from error


def find_prepared_folder(name: str, cache: Path) -> Path | None:
    """Return the folder of prepared data of a source; None for other sources."""
    if not name.startswith(S3):
        folder = Path(name).expanduser()
        return folder if is_prepared(folder) else None
    return copy_from_s3(name, cache)


@dataclass(frozen=True, slots=True)
class HeldBackText:
    """The held-back part of a source, limited to the needed tokens."""

    fraction: float | None
    """The fraction of the documents, by their hash; None: all documents of the blocks."""
    max_tokens: int
    """The number of tokens after which no further block is read."""
    blocks_file: str
    """The file with the source's blocks."""
    first: int
    """The first block to read."""

    def list_blocks(self) -> list[FileBlock]:
        """Return the blocks to read."""
        return [FileBlock(*row) for row in np.load(self.blocks_file)[self.first :].tolist()]

    def select(self, results: Iterator[list[TokenBlock]]) -> Iterator[list[TokenBlock]]:
        """Yield the held-back documents of encoded blocks until there are enough tokens."""
        tokens = 0
        for encoded in results:
            selected = encoded
            if self.fraction is not None:
                selected = [block.select(select_held_back(block.documents, self.fraction)) for block in encoded]
            tokens += sum(len(block.tokens) for block in selected)
            yield selected
            if tokens >= self.max_tokens:
                return


@dataclass(frozen=True, slots=True)
class PreparedRecipe:
    """Text and its tokenizer."""

    specs: tuple[SourceSpec, ...]
    tokenizer: Path
    max_bad_lines: int | None
    held_back: HeldBackText | None = None
    bos_prefix: BosPrefix = NO_BOS_PREFIX

    @property
    def name(self) -> str:
        """The sources, for messages."""
        return ", ".join(spec.name for spec in self.specs)

    def compute_key(self, cache_folder: Path | None) -> str:
        """Return a digest of everything on which the result depends. Raises UserError or StorageError."""
        parts: list[Any] = [
            FORMAT,
            hash_tokenizer(self.tokenizer),
            [spec.source.compute_identity(cache_folder) for spec in self.specs],
        ]
        if self.held_back is not None:
            held_back = self.held_back
            parts.append([held_back.fraction, held_back.max_tokens, held_back.first, Path(held_back.blocks_file).name])
        if facts := self.bos_prefix.list_settings():
            parts.append({"bos": facts})
        if end := end_facts(self.tokenizer):
            parts.append(end)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def open_inputs(self) -> BuildInputs:
        """Return the inputs of a build. Raises UserError."""
        held_back = self.held_back
        return BuildInputs(
            name=self.name,
            specs=self.specs,
            tokenizer=self.tokenizer,
            max_bad_lines=self.max_bad_lines,
            prepare=(initialize_worker, (self.specs, str(self.tokenizer), self.bos_prefix)),
            encode=encode,
            refuse_empty=self._refuse_empty,
            count_records=self._count_records,
            block_bytes=BLOCK_BYTES,
            files=functools.partial(write_tokenizer, self.tokenizer),
            bos_prefix=self.bos_prefix,
            blocks=None if held_back is None else held_back.list_blocks,
            select=iter if held_back is None else held_back.select,
        )

    def _refuse_empty(self, data: PreparedManifest) -> None:
        if not data.tokens and self.held_back is None:
            why = f" ({data.skipped} lines were skipped, the first: {data.examples[0]})" if data.examples else ""
            raise UserError(f"data.source {self.name}: holds no text{why}: give a source with text in it")

    def _count_records(self, data: PreparedManifest) -> int | None:
        if self.held_back is not None or any(spec.source.has_lines for spec in self.specs):
            return None
        return data.documents + data.skipped


@dataclass(frozen=True, slots=True)
class TextSource:
    """A source as prepared data or as text."""

    spec: SourceSpec
    weight: float
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
        sources = tuple(
            TextSource(SourceSpec(pin_source(name), field), weight, find_prepared_folder(name, cache))
            for name, field, weight in list_sources(config)
        )
        prepared = [text_source.prepared for text_source in sources if text_source.prepared is not None]
        if config.tokenizer.path is not None:
            file = find_tokenizer_file(config.tokenizer)
            count_entries(file)
        elif prepared:
            file = prepared[0] / TOKENIZER_FILE
        else:
            file = train_for_texts([text_source.spec for text_source in sources], config.tokenizer.vocab_size, cache)
        marks = [
            mark for text_source in sources if (mark := check_prepared_source(config, text_source, file)) is not None
        ]
        # tokenizer.json alone may not name the token.
        known = config.bos is BosToken.ALWAYS and marks
        bos_prefix = BosPrefix(config.bos, marks[0]) if known else find_document_bos_prefix(config.bos, file)
        return TextSources(config, cache, sources, file, bos_prefix)

    @property
    def weights(self) -> list[float]:
        """Weight of each source."""
        return [text_source.weight for text_source in self.sources]

    def open_tokens(
        self,
        text_source: TextSource,
        progress: Callable[[BuildProgress], None] | None = None,
        held: HeldBackText | None = None,
    ) -> PreparedData:
        """Open all tokens of a source, or what is `held` back of a text; build them if they are missing.

        Raises UserError or StorageError.
        """
        if text_source.prepared is not None:
            return PreparedData(text_source.prepared)
        recipe = PreparedRecipe((text_source.spec,), self.tokenizer, self.config.max_bad_lines, held, self.bos_prefix)
        key = recipe.compute_key(self.cache)
        return PreparedData(build_in_cache(self.config, "tokens", key, recipe.open_inputs(), self.cache, progress))

    def open_validation_source(self, name: str) -> PreparedData:
        """Return all tokens of the separate source of `data.validation`. Raises UserError or StorageError."""
        spec = SourceSpec(pin_source(name), self.config.text_field)
        text_source = TextSource(spec, 1.0, find_prepared_folder(name, self.cache))
        check_prepared_source(self.config, text_source, self.tokenizer)
        return self.open_tokens(text_source)


def check_prepared_source(config: DataConfig, text_source: TextSource, tokenizer: Path) -> tuple[int, ...] | None:
    """Return the BOS tokens of a prepared source; None for text.

    Raises UserError if it was prepared with another tokenizer, or `data.bos` demands others.
    """
    if text_source.prepared is None:
        return None
    manifest = read_manifest(text_source.prepared)
    if manifest.tokenizer != hash_tokenizer(tokenizer):
        raise UserError(
            f"data.source {text_source.spec.name}: was prepared with another tokenizer than {tokenizer}: leave out "
            "data.tokenizer.path, or prepare the data with that tokenizer"
        )
    mark = manifest.bos_tokens
    if config.bos is not BosToken.AUTO and (config.bos is BosToken.ALWAYS) != bool(mark):
        how = "with" if mark else "without"
        raise UserError(
            f"data.source {text_source.spec.name}: was prepared {how} BOS tokens, but data.bos is {config.bos}: leave "
            f"out data.bos, or prepare the data again with prepare-data --bos {config.bos}"
        )
    return mark


def build_in_cache(
    config: DataConfig,
    kind: str,
    key: str,
    inputs: BuildInputs,
    cache: Path,
    progress: Callable[[BuildProgress], None] | None = None,
) -> Path:
    """Build a folder, unless the cache has it, and warn about what was skipped. Raises UserError or StorageError."""
    folder = cache / f"{kind}-{key[:32]}"
    manifest = build(folder, inputs, key, workers=config.workers, progress=progress or _ProgressLog(inputs.name))
    if manifest.skipped:
        first = manifest.examples[0]
        _log.warning("data.source %s: skipped %d %s, the first: %s", inputs.name, manifest.skipped, inputs.unit, first)
    return folder


class _ProgressLog:
    """Logs the progress of a long build at intervals."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = time.monotonic()

    def __call__(self, progress: BuildProgress) -> None:
        """Log the progress, unless it was logged recently."""
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            share = 100 * progress.bytes / max(1, progress.total_bytes)
            _log.info("tokenizing %s: %.0f %%, %d tokens", self._name, share, progress.tokens)
