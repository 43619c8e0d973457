"""Encode the examples of one source by worker processes, and keep them in a folder of the cache.

    manifest.json    written last: a folder that has it is whole
    ids.bin          tokens of all examples, one after another
    trained.bin      for each token whether it is learned, one byte
    rows.bin         for each example where its tokens end, where its last answer begins, and the hash of its record
    before.bin       tokens of every example before it was cut or dropped, int64

Guarantees:
- The folder is a pure function of the recipe, whatever the number of processes and however often the work was killed.
- It is built once per machine, and appears by one rename.
- What a killed build left beside it is continued from its last note; what it wrote after that is cut off.
- A file of another size than in the manifest is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.examples.blocks import Counts, encode_block, install
from trainium_trainer.data.examples.templates import explain_empty_filter
from trainium_trainer.data.prepared.build import BuildProgress, count_processes, hold_lock, write_durably
from trainium_trainer.data.sources.documents import refuse_skipped, refuse_skipped_share
from trainium_trainer.data.tokens.encoding import list_blocks
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from trainium_trainer.data.examples.blocks import ExampleBlock
    from trainium_trainer.data.examples.recipe import Recipe


ROW = np.dtype([("end", "<i8"), ("answer", "<i8"), ("record", "<u8")])
_FILES = ("ids.bin", "trained.bin", "rows.bin", "before.bin")
_MANIFEST, _NOTE = "manifest.json", "note.json"
_SENTENCES = 5
_BETWEEN_NOTES = 64 << 20


@dataclass(slots=True)
class ExamplesManifest:
    """Contents of a folder."""

    key: str
    vocabulary: int
    padding: int
    """The token that fills up a sequence."""
    blocks: int = 0
    examples: int = 0
    tokens: int = 0
    skipped: int = 0
    sentences: list[str] = field(default_factory=list)
    """About the first records that were skipped."""
    counts: Counts = field(default_factory=Counts)
    sizes: list[int] = field(default_factory=lambda: [0] * len(_FILES))
    identity: str = ""
    """Digest of the examples."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens."""
        return np.dtype(np.uint16 if self.vocabulary <= 2**16 else np.uint32)


def _read(file: Path) -> ExamplesManifest | None:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        return ExamplesManifest(**(document | {"counts": Counts(**document["counts"])}))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_manifest(folder: Path) -> ExamplesManifest | None:
    """Return the manifest of a whole folder; None when there is none."""
    return _read(folder / _MANIFEST)


class Writer:
    """A folder in the making."""

    def __init__(self, folder: Path, empty: ExamplesManifest) -> None:
        """Continue where a killed predecessor left a note, when it made the same; else start again."""
        self._folder = folder
        self._path = folder.with_name(folder.name + ".partial")
        left = _read(self._path / _NOTE)
        if left is None or left.key != empty.key:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path.mkdir(parents=True)
        self.manifest = left if left is not None and left.key == empty.key else empty
        self.resumed_tokens = self.manifest.tokens
        self._streams = [(self._path / name).open("ab") for name in _FILES]
        for stream, size in zip(self._streams, self.manifest.sizes, strict=True):
            stream.truncate(size)
            stream.seek(0, os.SEEK_END)
        self._noted = sum(self.manifest.sizes)

    def add(self, block: ExampleBlock) -> None:
        """Append the examples of the next block."""
        manifest = self.manifest
        rows = np.zeros(len(block.lengths), ROW)
        rows["end"] = manifest.tokens + np.cumsum(block.lengths)
        rows["answer"], rows["record"] = block.answers, block.records
        for number, values in enumerate((block.ids, block.trained.astype(np.uint8), rows, block.before)):
            data = values.tobytes()
            self._streams[number].write(data)
            manifest.sizes[number] += len(data)
        manifest.blocks += 1
        manifest.examples += len(rows)
        manifest.tokens += len(block.ids)
        manifest.skipped += len(block.skipped)
        space = _SENTENCES - len(manifest.sentences)
        manifest.sentences += [one.sentence() for one in block.skipped[:space]]
        manifest.counts.add(block.counts)
        if sum(manifest.sizes) - self._noted >= _BETWEEN_NOTES:
            self.note()

    def note(self) -> None:
        """Make what is written so far a place to go on from."""
        self._flush()
        write_durably(self._path / _NOTE, json.dumps(asdict(self.manifest)))
        self._noted = sum(self.manifest.sizes)

    def _flush(self) -> None:
        for stream in self._streams:
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self) -> ExamplesManifest:
        """Give the folder its name."""
        self._flush()
        self.close()
        total = hashlib.sha256()
        for name in _FILES[:3]:
            with (self._path / name).open("rb") as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
        self.manifest.identity = total.hexdigest()
        write_durably(self._path / _MANIFEST, json.dumps(asdict(self.manifest), indent=1) + "\n")
        self._path.rename(self._folder)
        (self._folder / _NOTE).unlink(missing_ok=True)
        return self.manifest

    def close(self) -> None:
        """Let go of the files; what was written after the last note is lost."""
        for stream in self._streams:
            stream.close()

    def discard(self) -> None:
        """Remove what was written: it is good for nothing."""
        self.close()
        shutil.rmtree(self._path, ignore_errors=True)


class StoredExamples:
    """An open folder; its files are mapped into memory."""

    def __init__(self, folder: Path) -> None:
        """Open it and check the sizes of its files. Raises UserError, OSError."""
        manifest = read_manifest(folder)
        if manifest is None:
            raise UserError(f"{folder / _MANIFEST}: cannot be read: remove the folder, it will be made again")
        self.folder = folder
        self.manifest = manifest
        for name, size in zip(_FILES, manifest.sizes, strict=True):
            file = folder / name
            if not file.is_file() or file.stat().st_size != size:
                raise UserError(
                    f"{file}: does not have the {size} bytes that it should: remove {folder}, it will be made again"
                )
        self.ids: NDArray[Any] = _mapped(folder / _FILES[0], manifest.dtype)
        self.trained: NDArray[np.bool_] = _mapped(folder / _FILES[1], np.dtype(np.bool_))
        self.rows: NDArray[Any] = _mapped(folder / _FILES[2], ROW)
        self.before: NDArray[np.int64] = _mapped(folder / _FILES[3], np.dtype(np.int64))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example."""
        return np.diff(self.rows["end"], prepend=0)

    def example(self, number: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Tokens of an example, and which are learned."""
        start = int(self.rows["end"][number - 1]) if number else 0
        end = int(self.rows["end"][number])
        return self.ids[start:end], self.trained[start:end]


def _mapped(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(file, dtype, "r") if file.stat().st_size else np.empty(0, dtype)


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
        with hold_lock(folder.with_name(f".{folder.name}.lock")):
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
    pool.grow(min(count_processes(workers), len(left)))
    total = sum(block.size for block in blocks)
    done = total - sum(block.size for block in left)
    _report(progress, writer, done, total)
    for block, encoded in zip(left, pool.map(encode_block, [(block,) for block in left]), strict=True):
        for number, skipped in enumerate(encoded.skipped, start=writer.manifest.skipped + 1):
            refuse_skipped(number, skipped, recipe.max_bad_lines, "records")
        writer.add(encoded)
        done += block.size
        _report(progress, writer, done, total)


def _report(progress: Callable[[BuildProgress], None], writer: Writer, done: int, total: int) -> None:
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
        return UserError(f"{name}: {explain_empty_filter(config.where, counts.found, counts.records)}")
    if counts.left_out:
        return UserError(f"{name}: data.examples.function left all of its {counts.left_out:,} records out: correct it")
    return UserError(f"{name}: holds no record: give a source with records in it")
