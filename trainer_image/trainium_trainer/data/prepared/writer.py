"""Writing prepared data: a killed process leaves what can be continued, and never what only looks whole.

Invariants: everything is written beside the folder, in `<folder>.partial`, and one rename makes it the folder, with the
manifest in it; each finished file of tokens has a note of where the source goes on, written after it; a partial folder
that was made from anything else is thrown away.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.prepared.columns import column_of
from trainium_trainer.data.prepared.prepared import INDEX_FILE, MANIFEST_FILE, PreparedManifest, Shard
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from trainium_trainer.data.tokens.encoding import TokenBlock

_BATCH_TOKENS = 1 << 20
_EXAMPLES = 5
_PLAN = "plan.json"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock; the kernel drops it when the holder dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def durable(path: Path, text: str) -> None:
    """Write a small file so that it is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


class PartialFolder:
    """A prepared folder in the making."""

    def __init__(self, folder: Path, key: str) -> None:
        """Open what a killed predecessor left, when it was made from the same; else an empty one.

        UserError when there is a folder of that name that no predecessor made.
        """
        self.folder = folder
        self.path = folder.with_name(folder.name + ".partial")
        plan = self.path / _PLAN
        if not plan.exists() and self.path.exists() and {each.name for each in self.path.iterdir()} - {f"{_PLAN}.tmp"}:
            raise UserError(f"{self.path}: is there already and is no unfinished prepared data: choose another folder")
        if not plan.exists() or json.loads(plan.read_text(encoding="utf-8")) != key:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
            durable(plan, json.dumps(key))
        self.shards: list[Shard] = []
        while (note := self._note(len(self.shards))).exists():
            document = json.loads(note.read_text(encoding="utf-8"))
            self.shards.append(Shard(**(document | {"examples": tuple(document["examples"])})))

    def _note(self, number: int) -> Path:
        return self.path / f"tokens-{number:05d}.json"

    @property
    def blocks(self) -> int:
        """Blocks of the source that are done."""
        return self.shards[-1].blocks if self.shards else 0

    @property
    def tokens(self) -> int:
        """Tokens that are done."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents that are done."""
        return sum(shard.documents for shard in self.shards)

    @property
    def skipped(self) -> int:
        """Lines that were skipped."""
        return sum(shard.skipped for shard in self.shards)

    def writer(self, dtype: np.dtype[Any], end: int) -> ShardWriter:
        """A writer of the next file."""
        return ShardWriter(self.path / f"tokens-{len(self.shards):05d}.arrow", dtype, end)

    def take(self, writer: ShardWriter, blocks: int) -> None:
        """Finish a file: from now on it need not be made again."""
        shard = writer.finish(blocks)
        durable(self._note(len(self.shards)), json.dumps(asdict(shard)))
        self.shards.append(shard)

    def publish(self, manifest: PreparedManifest) -> None:
        """Write index and manifest and give the folder its name."""
        self._write_index()
        durable(self.path / MANIFEST_FILE, manifest.to_json())
        self.path.rename(self.folder)
        for note in (*self.folder.glob("tokens-*.json"), self.folder / _PLAN):  # not before: they are the way back
            note.unlink(missing_ok=True)
        descriptor = os.open(self.folder.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _write_index(self) -> None:
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        rows: dict[str, list[int]] = {"shard": [], "batch": [], "tokens": [], "pieces": []}
        for number, shard in enumerate(self.shards):
            with pa.memory_map(str(self.path / shard.file)) as stream:
                reader = pa.ipc.open_file(stream)
                for index in range(reader.num_record_batches):
                    column = reader.get_batch(index).column("tokens")
                    for name, value in zip(rows, (number, index, len(column.values), len(column)), strict=True):
                        rows[name].append(value)
        table = pa.table({name: column_of(np.array(values, np.int64)) for name, values in rows.items()})
        temporary = self.path / "index.tmp"
        with temporary.open("wb") as stream:
            with pa.ipc.new_file(stream, table.schema) as writer:
                writer.write_table(table)
            os.fsync(stream.fileno())
        temporary.replace(self.path / INDEX_FILE)


@dataclass(slots=True)
class ShardWriter:
    """One file of tokens that is being written."""

    path: Path
    dtype: np.dtype[Any]
    end: int
    tokens: int = 0
    documents: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    _largest: int = 0
    _digest: Any = field(default_factory=hashlib.sha256)
    _waiting: list[TokenBlock] = field(default_factory=list)
    _waiting_tokens: int = 0
    _stream: Any = None
    _file: Any = None

    def add(self, block: TokenBlock) -> None:
        """Append a block; small ones are put together."""
        self.skipped += len(block.skipped)
        room = _EXAMPLES - len(self.examples)
        self.examples += [skipped.sentence() for skipped in block.skipped[:room]]
        if not len(block.tokens):
            return
        self.tokens += len(block.tokens)
        self.documents += int((block.tokens == self.end).sum())
        self._largest = max(self._largest, int(block.tokens.max()))
        self._digest.update(block.tokens.tobytes())
        self._waiting.append(block)
        self._waiting_tokens += len(block.tokens)
        if self._waiting_tokens >= _BATCH_TOKENS:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa  # noqa: PLC0415 - as above

        lengths: NDArray[np.int64] = np.concatenate([block.lengths for block in self._waiting])
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        values = column_of(np.concatenate([block.tokens for block in self._waiting]))
        tokens = pa.LargeListArray.from_arrays(column_of(offsets), values)
        documents = column_of(np.concatenate([block.documents for block in self._waiting]))
        batch = pa.record_batch([tokens, documents], names=["tokens", "document"])
        if self._file is None:
            self._open(batch.schema)
        self._file.write_batch(batch)
        self._waiting, self._waiting_tokens = [], 0

    def _open(self, schema: Any) -> None:
        import pyarrow as pa  # noqa: PLC0415 - as above

        self._stream = self.path.with_suffix(".tmp").open("wb")
        self._file = pa.ipc.new_file(self._stream, schema)

    def finish(self, blocks: int) -> Shard:
        """Close the file and give it its name."""
        import pyarrow as pa  # noqa: PLC0415 - as above

        if self._waiting:
            self._write()
        if self._file is None:  # nothing but skipped lines
            kinds = {"tokens": pa.large_list(pa.from_numpy_dtype(self.dtype)), "document": pa.uint64()}
            self._open(pa.schema(kinds))
        self._file.close()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self.path.with_suffix(".tmp").replace(self.path)
        return Shard(
            file=self.path.name,
            bytes=self.path.stat().st_size,
            tokens=self.tokens,
            documents=self.documents,
            largest=self._largest,
            digest=self._digest.hexdigest(),
            blocks=blocks,
            skipped=self.skipped,
            examples=tuple(self.examples),
        )
