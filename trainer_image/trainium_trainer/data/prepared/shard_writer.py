"""Write one file of tokens of a prepared folder, in Arrow's file format; `reader` describes its columns."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.prepared.reader import Shard, to_arrow
from trainium_trainer.data.tokens.encoding import RecordCounts, TokenBlock

if TYPE_CHECKING:
    from pathlib import Path

_BATCH_TOKENS = 1 << 20
MAX_EXAMPLES = 5
"""The number of messages about skipped records that a folder keeps."""


@dataclass(slots=True)
class ShardWriter:
    """Writes one file of tokens."""

    path: Path
    dtype: np.dtype[Any]
    end: int
    tokens: int = 0
    documents: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    _counts: RecordCounts | None = None
    _largest: int = 0
    _digests: dict[str, Any] = field(default_factory=dict)
    _waiting: list[TokenBlock] = field(default_factory=list)
    _waiting_tokens: int = 0
    _stream: Any = None
    _file: Any = None

    def add(self, block: TokenBlock) -> None:
        """Append a block; small blocks are combined."""
        self.skipped += len(block.skipped)
        space = MAX_EXAMPLES - len(self.examples)
        self.examples += [skipped.format_message() for skipped in block.skipped[:space]]
        if block.counts is not None:
            self._counts = self._counts or RecordCounts()
            self._counts.add(block.counts)
        if not len(block.lengths):
            return
        ends = block.tokens == self.end if block.examples is None else block.lengths > 0
        self.tokens += len(block.tokens)
        self.documents += int(ends.sum())
        self._largest = max(self._largest, int(block.tokens.max(initial=0)))
        hashed = {"tokens": block.tokens}
        if block.examples is not None:
            nonempty = block.lengths > 0
            rows = np.stack([block.lengths, block.examples.answers, block.documents.view(np.int64)], axis=1)[nonempty]
            hashed |= {"trained": block.examples.loss_mask, "rows": rows}
        for name, values in hashed.items():
            self._digests.setdefault(name, hashlib.sha256()).update(values.tobytes())
        self._waiting.append(block)
        self._waiting_tokens += len(block.tokens)
        if self._waiting_tokens >= _BATCH_TOKENS:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        lengths = np.concatenate([block.lengths for block in self._waiting])
        offsets = to_arrow(np.concatenate(([0], np.cumsum(lengths))))

        def build_lists(values: list[Any]) -> Any:
            return pa.LargeListArray.from_arrays(offsets, to_arrow(np.concatenate(values)))

        columns = {
            "tokens": build_lists([block.tokens for block in self._waiting]),
            "document": to_arrow(np.concatenate([block.documents for block in self._waiting])),
        }
        examples = [block.examples for block in self._waiting if block.examples is not None]
        if examples:
            columns["trained"] = build_lists([part.loss_mask.view(np.uint8) for part in examples])
            columns["answer"] = to_arrow(np.concatenate([part.answers for part in examples]))
            columns["before"] = to_arrow(np.concatenate([part.original_lengths for part in examples]))
        batch = pa.record_batch(columns)
        if self._file is None:
            self._open(batch.schema)
        self._file.write_batch(batch)
        self._waiting, self._waiting_tokens = [], 0

    def _open(self, schema: Any) -> None:
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        self._stream = self.path.with_suffix(".tmp").open("wb")
        self._file = pa.ipc.new_file(self._stream, schema)

    def finish(self, blocks: int) -> Shard:
        """Close the file and give it its name."""
        import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

        if self._waiting:
            self._write()
        if self._file is None:  # only skipped lines
            kinds = {"tokens": pa.large_list(pa.from_numpy_dtype(self.dtype)), "document": pa.uint64()}
            self._open(pa.schema(kinds))
        self._file.close()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self.path.with_suffix(".tmp").replace(self.path)
        digests = [digest.hexdigest() for digest in self._digests.values()] or [hashlib.sha256().hexdigest()]
        return Shard(
            file=self.path.name,
            bytes=self.path.stat().st_size,
            tokens=self.tokens,
            documents=self.documents,
            largest=self._largest,
            digest=digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
            blocks=blocks,
            skipped=self.skipped,
            examples=tuple(self.examples),
            counts=self._counts,
        )
