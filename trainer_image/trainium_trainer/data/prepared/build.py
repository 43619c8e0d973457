"""From sources to a prepared folder, by worker processes; the work of `prepare-data` and of the cache.

Invariants: the folder is a pure function of sources and tokenizer, whatever the number of processes and however often
the work was killed and taken up again; it is built once, whoever asks at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_contract.trainer.data import BosToken
from trainium_trainer.data.prepared.prepared import FORMAT, PreparedManifest, is_prepared, read_manifest
from trainium_trainer.data.prepared.writer import PartialFolder, durable, locked
from trainium_trainer.data.sources.documents import FileBlock, refuse_skipped, refuse_skipped_share
from trainium_trainer.data.tokens.bos import AS_IT_IS, BosPrefix
from trainium_trainer.data.tokens.encoding import encode, held_back, install, list_blocks, token_type
from trainium_trainer.data.tokens.tokenizer import TOKENIZER_FILE, digest_of, end_facts, vocabulary_of, write_tokenizer
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainium_trainer.data.tokens.encoding import SourceSpec, TokenBlock

BLOCK_BYTES = 4 << 20
_SHARD_TOKENS = 64 << 20
_MOST_WORKERS = 16


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Only what is held back of one source, and no more of it than is needed."""

    fraction: float | None
    """Share of the documents, by their hash; None: all documents of the blocks."""
    enough: int
    """Tokens after which no further block is read."""
    table: str
    """A file with the source's blocks."""
    first: int
    """The first block that is read."""


@dataclass(frozen=True, slots=True)
class PreparedRecipe:
    """What a prepared folder is made from."""

    specs: tuple[SourceSpec, ...]
    tokenizer: Path
    max_bad_lines: int | None
    held_back: HeldBack | None = None
    beginning: BosPrefix = AS_IT_IS

    @property
    def name(self) -> str:
        """The sources, for sentences."""
        return ", ".join(spec.name for spec in self.specs)

    def key(self, memo: Path | None) -> str:
        """Digest of all that the result depends on. Raises UserError or StorageError."""
        parts: list[Any] = [FORMAT, digest_of(self.tokenizer), [spec.open().identity(memo) for spec in self.specs]]
        if self.held_back is not None:
            held = self.held_back
            parts.append([held.fraction, held.enough, held.first, Path(held.table).name])
        if facts := self.beginning.facts():
            parts.append({"bos": facts})
        if end := end_facts(self.tokenizer):
            parts.append(end)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is."""

    bytes: int
    total_bytes: int
    documents: int
    tokens: int
    skipped: int
    resumed_tokens: int
    """Tokens that an earlier, killed run has left."""


def processes(wanted: int | None) -> int:
    """How many tokenising processes a node has."""
    return wanted or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


def build(
    folder: Path,
    recipe: PreparedRecipe,
    key: str,
    *,
    workers: int | None = None,
    progress: Callable[[BuildProgress], None] = lambda _: None,
    shard_tokens: int = _SHARD_TOKENS,
) -> PreparedManifest:
    """Make `folder`, unless it is there. Raises UserError, StorageError, WorkerError, OSError."""
    if not is_prepared(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            if not is_prepared(folder):
                if folder.exists():
                    raise UserError(f"{folder}: is there already and is not prepared data: choose another folder")
                _make(PartialFolder(folder, key), recipe, key, workers, progress, shard_tokens)
    manifest = read_manifest(folder)
    if manifest.key != key:
        raise UserError(f"{folder}: holds other prepared data: choose another folder, or remove this one")
    if manifest.skipped:
        first, limit = manifest.examples[0], recipe.max_bad_lines
        refuse_skipped(manifest.skipped, first, limit)
        if recipe.held_back is None and not any(spec.open().has_lines for spec in recipe.specs):
            refuse_skipped_share(recipe.name, manifest.skipped, manifest.documents + manifest.skipped, first, limit)
    return manifest


def _make(
    partial: PartialFolder,
    recipe: PreparedRecipe,
    key: str,
    workers: int | None,
    progress: Callable[[BuildProgress], None],
    shard_tokens: int,
) -> PreparedManifest:
    tokenizer = partial.path / TOKENIZER_FILE
    for name, text in write_tokenizer(recipe.tokenizer).items():
        durable(partial.path / name, text)
    vocabulary = vocabulary_of(tokenizer)
    prepare = (install, (recipe.specs, str(tokenizer), recipe.beginning))
    with Workers(1, prepare) as pool:
        end: int = pool.prepared
        blocks = _blocks(recipe, pool)
        left = blocks[partial.blocks :]
        pool.grow(min(processes(workers), len(left)))
        results = _counted(pool.map(encode, left), left, partial, blocks, progress)
        _write(partial, recipe, _selected(results, recipe.held_back), token_type(vocabulary), end, shard_tokens)
    if not partial.tokens and recipe.held_back is None:
        examples = [example for shard in partial.shards for example in shard.examples]
        why = f" ({partial.skipped} lines were skipped, the first: {examples[0]})" if examples else ""
        raise UserError(f"data.source {recipe.name}: holds no text{why}: give a source with text in it")
    return _publish(partial, recipe, key, vocabulary, end)


def _blocks(recipe: PreparedRecipe, pool: Workers) -> list[tuple[int, FileBlock]]:
    """Source and block of all that is read."""
    held = recipe.held_back
    if held is not None:
        return [(0, FileBlock(*row)) for row in np.load(held.table)[held.first :].tolist()]
    return [
        (number, block)
        for number, spec in enumerate(recipe.specs)
        for block in pool.call(list_blocks, spec, BLOCK_BYTES)
    ]


def _counted(
    results: Iterator[list[TokenBlock]],
    left: list[tuple[int, FileBlock]],
    partial: PartialFolder,
    blocks: list[tuple[int, FileBlock]],
    progress: Callable[[BuildProgress], None],
) -> Iterator[list[TokenBlock]]:
    """Pass results on and report them."""
    total = sum(block.size for _, block in blocks)
    done = total - sum(block.size for _, block in left)
    tokens, documents, skipped, resumed = partial.tokens, partial.documents, partial.skipped, partial.tokens
    progress(BuildProgress(done, total, documents, tokens, skipped, resumed))
    for (_, block), encoded in zip(left, results, strict=True):
        done += block.size
        tokens += sum(len(part.tokens) for part in encoded)
        skipped += sum(len(part.skipped) for part in encoded)
        documents += sum(len(np.unique(part.documents)) for part in encoded)
        yield encoded
        progress(BuildProgress(done, total, documents, tokens, skipped, resumed))


def _selected(results: Iterator[list[TokenBlock]], held: HeldBack | None) -> Iterator[list[TokenBlock]]:
    if held is None:
        yield from results
        return
    gathered = 0
    for encoded in results:
        kept = encoded
        if held.fraction is not None:
            kept = [select(block, held_back(block.documents, held.fraction)) for block in encoded]
        gathered += sum(len(block.tokens) for block in kept)
        yield kept
        if gathered >= held.enough:
            return


def select(block: TokenBlock, chosen: Any) -> TokenBlock:
    """The chosen pieces of a block, and what was skipped in it."""
    return replace(
        block,
        tokens=block.tokens[np.repeat(chosen, block.lengths)],
        lengths=block.lengths[chosen],
        documents=block.documents[chosen],
    )


def _write(
    partial: PartialFolder,
    recipe: PreparedRecipe,
    results: Iterable[list[TokenBlock]],
    dtype: np.dtype[Any],
    end: int,
    shard_tokens: int,
) -> None:
    """Write results to files of tokens, as many as it takes."""
    done, skipped = partial.blocks, partial.skipped
    writer = partial.writer(dtype, end)
    used = False
    for encoded in results:
        used = True
        done += 1
        for block in encoded:
            for one in block.skipped:
                skipped += 1
                refuse_skipped(skipped, one, recipe.max_bad_lines)
            writer.add(block)
        if writer.tokens >= shard_tokens:
            partial.take(writer, done)
            writer, used = partial.writer(dtype, end), False
    if used:
        partial.take(writer, done)


def _publish(partial: PartialFolder, recipe: PreparedRecipe, key: str, vocabulary: int, end: int) -> PreparedManifest:
    digest = hashlib.sha256("".join(shard.digest for shard in partial.shards).encode())
    examples = [example for shard in partial.shards for example in shard.examples]
    manifest = PreparedManifest(
        key=key,
        identity=digest.hexdigest(),
        sources=tuple(spec.name for spec in recipe.specs),
        tokens=partial.tokens,
        documents=partial.documents,
        skipped=partial.skipped,
        examples=tuple(examples[:5]),
        vocabulary=vocabulary,
        dtype=token_type(vocabulary).name,
        end_of_document=end,
        tokenizer=digest_of(partial.path / TOKENIZER_FILE),
        shards=tuple(partial.shards),
        beginning=recipe.beginning.tokens if recipe.beginning.rule is BosToken.ALWAYS else (),
    )
    partial.publish(manifest)
    return manifest
