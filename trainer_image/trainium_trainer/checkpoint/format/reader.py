"""Read any box of any tensor of a committed checkpoint; each byte is read once and verified.

The index describes how tensors are divided. The offset of a part is derived from the index, only for the requested
files, and checked against the digest of each file's header. Requests become extents of whole blocks of 8 MiB; a few
threads read, hash and copy them.

Guarantees:
- The manifest verifies the index before it is used, and no byte reaches a tensor before its block is verified.
- The parsed data grows with the files that are read, not with the number of ranks that wrote.
- A block is read once, no matter how many boxes need it.
- Memory is bounded by the extents in progress, one chunk per thread and a few cached blocks. An export, which reads a
  tensor a few rows at a time, reads the block at a border once, because it is cached for the next rows.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trainium_contract.wire.checkpoint_manifest import (
    BLOCK_BYTES,
    INDEX_NAME,
    block_digest,
    blocks_name,
    digest_bytes,
    shard_name,
)
from trainium_trainer.checkpoint.format.layout import INDEX_FORMAT, ITEM_BYTES, CheckpointLayout, build_file_header
from trainium_trainer.checkpoint.format.live_state import flatten, get_box, to_local
from trainium_trainer.checkpoint.format.writer import SAFETENSORS_TYPES
from trainium_trainer.checkpoint.sharding import Box
from trainium_trainer.storage.errors import DamagedFileError
from trainium_trainer.storage.protocol import Retry, Storage, read_part, read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainium_trainer.checkpoint.interfaces import TrainingState
    from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint


_TORCH_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}
_DIGEST = 64
"""The characters of a block's digest."""


@dataclass(frozen=True, slots=True)
class WrittenBox:
    """A box of a tensor as one rank wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """The offset in the file, in bytes."""
    length: int
    """The length in bytes."""


def open_index(storage: Storage, checkpoint: CommittedCheckpoint, retry: Retry) -> Index:
    """Read the index of a checkpoint. Raises DamagedFileError when it is not what was written."""
    digests = {file.name: file.digest for file in checkpoint.manifest.files}

    def read(name: str) -> dict[str, Any]:
        path = f"{checkpoint.folder}/{name}"
        data = retry.run(lambda: read_small(storage, path), storage.location)
        if data is None or digest_bytes(data) != digests.get(name):
            raise DamagedFileError(f"{path} does not have the contents that were written")
        try:
            raw: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise DamagedFileError(f"{path} is not JSON") from error
        return raw

    path = f"{checkpoint.folder}/{INDEX_NAME}"
    raw = read(INDEX_NAME)
    try:
        if raw["blockBytes"] != BLOCK_BYTES or raw["format"] != INDEX_FORMAT:
            raise DamagedFileError(f"{path} is of another format")
        return Index(checkpoint.folder, CheckpointLayout.from_json(raw), list(digests), read)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DamagedFileError(f"{path} is not an index") from error


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a checkpoint; small, because one reader may need those of 4,096 ranks."""

    starts: array[int]
    """The start of each tensor's box in the file, by the tensor's index; 0 if the file has none."""
    size: int
    blocks: list[str]


class Index:
    """The locations of all tensors of a checkpoint."""

    def __init__(
        self, folder: str, layout: CheckpointLayout, names: list[str], read: Callable[[str], dict[str, Any]]
    ) -> None:
        """Parse the index; `names` include those of the tables in the folder; `read` returns a verified table."""
        self._folder = folder
        self._layout = layout
        self._read = read
        prefix, suffix = blocks_name(0).split(f"{0:05d}")
        self._firsts = sorted(int(name[len(prefix) : -len(suffix)]) for name in names if name.startswith(prefix))
        self._numbers = {name: number for number, name in enumerate(layout.tensors)}
        self._tables: dict[int, dict[str, Any]] = {}
        self._files: dict[str, _File] = {}
        self.tensors = layout.tensors

    def find_parts(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[WrittenBox]:
        """Yield the written parts of a tensor that overlap a box. Raises DamagedFileError and StorageError."""
        for box, rank in self._layout.find_writers(name, Box(offsets, sizes)):
            start = self._find_file(rank).starts[self._numbers[name]]
            length = box.volume * ITEM_BYTES[self._layout.tensors[name].dtype]
            yield WrittenBox(box.offsets, box.sizes, shard_name(rank), start, length)

    def read_blocks(self, file: str) -> tuple[int, list[str]]:
        """Return the size of a part's file and the digests of its blocks."""
        entry = self._files[file]
        return entry.size, entry.blocks

    def _find_file(self, rank: int) -> _File:
        name = shard_name(rank)
        if name not in self._files:
            items = self._layout.plan_items(rank)
            header, spans = build_file_header(items)
            try:
                entry = self._read_table(rank)["files"][name]
                size, blocks = int(entry["size"]), str(entry["blocks"])
                if hashlib.sha256(header).hexdigest() != entry["header"] or spans[-1][1] != size:
                    raise DamagedFileError(f"{self._folder}/{name} is not divided as in {INDEX_NAME}")
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise DamagedFileError(f"{self._folder} has no description of {name}") from error
            digests = [blocks[start : start + _DIGEST] for start in range(0, len(blocks), _DIGEST)]
            starts = array("Q", bytes(8 * len(self._numbers)))
            for item, (start, _) in zip(items, spans, strict=True):
                starts[self._numbers[item.name]] = start
            self._files[name] = _File(starts, size, digests)
        return self._files[name]

    def _read_table(self, rank: int) -> dict[str, Any]:
        """Return the table that contains a rank's digests."""
        position = bisect_right(self._firsts, rank) - 1
        if position < 0:
            raise KeyError(rank)
        first = self._firsts[position]
        if first not in self._tables:
            self._tables[first] = self._read(blocks_name(first))
        return self._tables[first]


_EXTENT_BLOCKS = 4
_CHUNK_BYTES = _EXTENT_BLOCKS * BLOCK_BYTES
_THREADS = 4
_MAX_CACHED_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A box of a part to copy into `target`, which has the shape of the box."""

    part: WrittenBox
    dtype: torch.dtype
    offsets: tuple[int, ...]
    """The offsets within the part."""
    target: torch.Tensor


@dataclass(slots=True)
class _Chunk:
    """Some rows of a wanted box: a range of a file and the destination of its bytes."""

    start: int
    end: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    """The shape of the stored rows."""
    offsets: tuple[int, ...]
    """The start of the wanted box in the stored rows, for all dimensions but the first."""
    target: torch.Tensor
    missing: int
    buffer: torch.Tensor | None = field(default=None)
    """The destination of the bytes: the target's memory, or a buffer until all bytes have been read."""


class CheckpointReader:
    """The tensors of one committed checkpoint in one folder."""

    def __init__(self, storage: Storage, checkpoint: CommittedCheckpoint, retry: Retry) -> None:
        """Read the index. Raises DamagedFileError if it is damaged and StorageError if it cannot be read."""
        self._storage = storage
        self._folder = checkpoint.folder
        self._retry = retry
        self._cached_blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        """Verified blocks by file and index, the newest last."""
        self._fill_lock = threading.Lock()
        self._index = open_index(storage, checkpoint, retry)
        self.tensors = self._index.tensors
        """All tensors by name."""

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU. Raises KeyError if the checkpoint has no tensor of that name."""
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=_TORCH_TYPES[stored.dtype])
        self.fill(self.plan_read(name, (0,) * len(stored.shape), tensor))
        return tensor

    def plan_read(self, name: str, offsets: tuple[int, ...], target: torch.Tensor) -> list[ReadItem]:
        """Return the reads for the box of `target`'s size that begins at `offsets` in a tensor.

        Raises KeyError if the checkpoint has no tensor of that name and DamagedFileError if a part of the box is
        missing.
        """
        stored = self.tensors[name]
        items: list[ReadItem] = []
        values = 0
        for part in self._index.find_parts(name, offsets, tuple(target.shape)):
            box, inside = target, []
            for dimension, (begin, start, length) in enumerate(zip(offsets, part.offsets, part.sizes, strict=True)):
                low = max(begin, start)
                high = min(begin + target.shape[dimension], start + length)
                box = box.narrow(dimension, low - begin, high - low)
                inside.append(low - start)
            values += box.numel()
            items.append(ReadItem(part, _TORCH_TYPES[stored.dtype], tuple(inside), box))
        if values != target.numel():
            raise DamagedFileError(f"{self._folder} has {values} of the {target.numel()} values of a part of {name}")
        return items

    @torch.no_grad()
    def fill(self, wanted: Sequence[ReadItem]) -> None:
        """Fill all targets. Raises DamagedFileError if a file is not what was written; the targets are then undefined.

        Calls of several threads run one after the other, so that the next call finds the blocks that the last one
        cached.
        """
        by_file: dict[str, list[_Chunk]] = {}
        for item in wanted:
            by_file.setdefault(item.part.file, []).extend(_divide_into_chunks(item))
        with self._fill_lock, ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-read") as pool:
            lock = threading.Lock()
            work = [
                pool.submit(self._read_extent, name, first, last, touched, lock)
                for name, chunks in by_file.items()
                for first, last, touched in _join_adjacent_blocks(sorted(chunks, key=lambda chunk: chunk.start))
            ]
            try:
                for read in work:
                    read.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _read_extent(self, name: str, first: int, last: int, chunks: list[_Chunk], lock: threading.Lock) -> None:
        path = f"{self._folder}/{name}"
        size, digests = self._index.read_blocks(name)
        base, end = first * BLOCK_BYTES, min(size, last * BLOCK_BYTES)
        buffer = torch.empty(max(0, end - base), dtype=torch.uint8)
        view = buffer.numpy().data
        with lock:
            cached = self._cached_blocks.pop((name, first), None)
        if cached is not None:
            view[: len(cached)] = cached
        verified = 0 if cached is None else len(cached)
        if verified < len(view):
            read_part(self._storage, path, base + verified, view[verified:], self._retry)
        for number in range(first if cached is None else first + 1, last):
            offset = number * BLOCK_BYTES - base
            if block_digest([view[offset : offset + BLOCK_BYTES]]) != digests[number]:
                raise DamagedFileError(f"{path} does not have the contents that were written")
        if max(chunk.end for chunk in chunks) < end:
            self._store_block(name, last - 1, view[(last - 1) * BLOCK_BYTES - base :], lock)
        for chunk in chunks:
            low, high = max(chunk.start, base), min(chunk.end, end)
            with lock:
                if chunk.buffer is None:
                    chunk.buffer = _find_buffer(chunk)
            # Copies plain bytes because torch would start more threads for each copy, in each of these threads.
            chunk.buffer.numpy().data[low - chunk.start : high - chunk.start] = view[low - base : high - base]
            with lock:
                chunk.missing -= high - low
                done = chunk.missing == 0
            if done:
                _copy_to_target(chunk)

    def _store_block(self, name: str, number: int, block: memoryview, lock: threading.Lock) -> None:
        """Cache a block that is needed again."""
        copy = bytes(block)
        with lock:
            self._cached_blocks[name, number] = copy
            while len(self._cached_blocks) > _MAX_CACHED_BLOCKS:
                self._cached_blocks.popitem(last=False)


def load_checkpoint(storage: Storage, checkpoint: CommittedCheckpoint, state: TrainingState, retry: Retry) -> None:
    """Fill the live state from a committed checkpoint of any size and verify the bytes; local, not collective.

    Raises DamagedFileError and StorageError, and ValueError if the checkpoint holds another state.
    """
    reader = CheckpointReader(storage, checkpoint, retry)
    live = state.state_dict()
    wanted: list[ReadItem] = []
    for name, value in flatten(live).items():
        stored = reader.tensors.get(name)
        if stored is None:
            raise DamagedFileError(f"{checkpoint.folder} has no {name}")
        if stored.shape != tuple(value.shape):
            raise ValueError(f"{name} has the size {list(stored.shape)} there and {list(value.shape)} here")
        box = get_box(value)
        if box.volume:
            wanted += reader.plan_read(name, box.offsets, to_local(value))
    reader.fill(wanted)
    state.load_state_dict(live)


def _divide_into_chunks(wanted: ReadItem) -> Iterator[_Chunk]:
    """Yield the ranges of rows of a box."""
    part, target = wanted.part, wanted.target
    if target.numel() == 0:
        return
    if not part.sizes:
        yield _Chunk(part.start, part.start + part.length, wanted.dtype, (), (), target, part.length)
        return
    row_bytes = part.length // part.sizes[0]
    rows_per_chunk = max(1, _CHUNK_BYTES // row_bytes)
    rows = target.shape[0]
    for first_row in range(0, rows, rows_per_chunk):
        count = min(rows_per_chunk, rows - first_row)
        start = part.start + (wanted.offsets[0] + first_row) * row_bytes
        yield _Chunk(
            start=start,
            end=start + count * row_bytes,
            dtype=wanted.dtype,
            sizes=(count, *part.sizes[1:]),
            offsets=wanted.offsets[1:],
            target=target.narrow(0, first_row, count),
            missing=count * row_bytes,
        )


def _join_adjacent_blocks(chunks: list[_Chunk]) -> Iterator[tuple[int, int, list[_Chunk]]]:
    """Yield runs of adjacent blocks of one file with the chunks in them; `chunks` are sorted by their start."""
    spans = [range(chunk.start // BLOCK_BYTES, -(-chunk.end // BLOCK_BYTES)) for chunk in chunks]
    needed = sorted({number for span in spans for number in span})
    pending = list(chunks)
    position = 0
    while position < len(needed):
        first = needed[position]
        last = first + 1
        position += 1
        while position < len(needed) and needed[position] == last and last - first < _EXTENT_BLOCKS:
            last += 1
            position += 1
        low, high = first * BLOCK_BYTES, last * BLOCK_BYTES
        pending = [chunk for chunk in pending if chunk.end > low]
        yield first, last, [chunk for chunk in pending if chunk.start < high]


def _find_buffer(chunk: _Chunk) -> torch.Tensor:
    """Return the target's bytes if the stored rows are contiguous in it, else a buffer."""
    target = chunk.target
    if (
        target.device.type == "cpu"
        and target.dtype == chunk.dtype
        and target.is_contiguous()
        and tuple(target.shape) == chunk.sizes
    ):
        return target.reshape(-1).view(torch.uint8)
    return torch.empty(chunk.end - chunk.start, dtype=torch.uint8)


def _copy_to_target(chunk: _Chunk) -> None:
    """Copy the chunk's buffer, if it has one, into its target."""
    assert chunk.buffer is not None
    tensor = chunk.buffer.view(chunk.dtype).view(chunk.sizes)
    if tensor.data_ptr() != chunk.target.data_ptr():
        for dimension, offset in enumerate(chunk.offsets, start=1):
            tensor = tensor.narrow(dimension, offset, chunk.target.shape[dimension])
        chunk.target.copy_(tensor)
    chunk.buffer = None
