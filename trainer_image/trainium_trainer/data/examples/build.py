"""From a source of records to a folder of encoded examples, by worker processes.

Invariants: the folder is a pure function of the recipe, whatever the number of processes and however often the work was
killed and taken up again; it is made once per machine, whoever asks at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_trainer.data.examples.blocks import encode_block, install
from trainium_trainer.data.examples.forms.filter import nothing_left
from trainium_trainer.data.examples.store import ExamplesManifest, Writer, read_manifest
from trainium_trainer.data.prepared.build import BuildProgress, processes
from trainium_trainer.data.prepared.writer import locked
from trainium_trainer.data.sources.documents import refuse_skipped, refuse_skipped_share
from trainium_trainer.data.tokens.encoding import list_blocks
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainium_trainer.data.examples.recipe import Recipe

BLOCK_BYTES = 1 << 20


def build_examples(
    folder: Path,
    recipe: Recipe,
    key: str,
    *,
    workers: int | None = None,
    progress: Callable[[BuildProgress], None] = lambda _: None,
) -> ExamplesManifest:
    """Make `folder`, unless it is there. Raises UserError, StorageError, WorkerError, OSError."""
    manifest = read_manifest(folder)
    if manifest is None:
        with locked(folder.with_name(f".{folder.name}.lock")):
            manifest = read_manifest(folder)
            if manifest is None:
                manifest = _make(folder, recipe, key, workers, progress)
    if manifest.skipped:
        first, limit = manifest.sentences[0], recipe.max_bad_lines
        refuse_skipped(manifest.skipped, first, limit, "records")
        records = manifest.counts.records + manifest.counts.unreadable
        refuse_skipped_share(recipe.source, manifest.skipped, records, first, limit)
    return manifest


def _make(
    folder: Path, recipe: Recipe, key: str, workers: int | None, progress: Callable[[BuildProgress], None]
) -> ExamplesManifest:
    with Workers(1, (install, (recipe,))) as pool:
        vocabulary, padding = pool.prepared
        writer = Writer(folder, ExamplesManifest(key=key, vocabulary=vocabulary, padding=padding))
        try:
            _fill(writer, recipe, pool, workers, progress)
            if not writer.manifest.examples:
                raise _empty(recipe, writer.manifest)
            return writer.publish()
        except UserError:
            writer.discard()
            raise
        finally:
            writer.close()


def _fill(
    writer: Writer, recipe: Recipe, pool: Workers, workers: int | None, progress: Callable[[BuildProgress], None]
) -> None:
    """Write the blocks that are not there yet."""
    blocks = pool.call(list_blocks, recipe.spec, BLOCK_BYTES)
    left = blocks[writer.manifest.blocks :]
    pool.grow(min(processes(workers), len(left)))
    total = sum(block.size for block in blocks)
    done = total - sum(block.size for block in left)
    _tell(progress, writer, done, total)
    for block, encoded in zip(left, pool.map(encode_block, [(block,) for block in left]), strict=True):
        for number, skipped in enumerate(encoded.skipped, start=writer.manifest.skipped + 1):
            refuse_skipped(number, skipped, recipe.max_bad_lines, "records")
        writer.add(encoded)
        done += block.size
        _tell(progress, writer, done, total)


def _tell(progress: Callable[[BuildProgress], None], writer: Writer, done: int, total: int) -> None:
    made = writer.manifest
    progress(BuildProgress(done, total, made.examples, made.tokens, made.skipped, writer.resumed_tokens))


def _empty(recipe: Recipe, made: ExamplesManifest) -> UserError:
    """Why there is no example, in one sentence."""
    counts, config = made.counts, recipe.config
    name = f"data.source {recipe.source}"
    if counts.dropped:
        return UserError(
            f"{name}: all of its {counts.dropped:,} examples are longer than data.sequenceLength "
            f"{recipe.sequence_length} (the shortest has {counts.shortest_dropped:,} tokens): raise it, or set "
            "data.examples.tooLong to CutLeft or CutRight"
        )
    if made.sentences:
        first = made.sentences[0]
        return UserError(f"{name}: holds no example: {made.skipped} records were skipped, the first: {first}")
    if counts.filtered:
        return UserError(f"{name}: {nothing_left(config.where, counts.found, counts.records)}")
    if counts.left_out:
        return UserError(f"{name}: data.examples.function left all of its {counts.left_out:,} records out: correct it")
    return UserError(f"{name}: holds no record: give a source with records in it")
