"""Read the tensors of a committed checkpoint: any box of any tensor, each byte read once and verified.

The index describes how tensors are divided. Where a part lies is derived from that, for the files that are asked for
and no others, and compared with the digest of each file's header. What is wanted is turned into extents of whole blocks
of 8 MiB; a few threads read, hash and copy them.

Guarantees:
- The index is verified by the manifest before it is used, and no byte reaches a tensor before its block was found to be
  what was written.
- What is parsed grows with the files that are read, not with the number of ranks that wrote.
- A block is read once however many boxes need it.
- Memory stays bounded by the extents under way, one chunk per thread and a few kept blocks. Who reads a tensor a few
  rows at a time, as an export does, reads the block on a border once: it is kept for the next rows.
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
    digest_of,
    shard_name,
)
from trainium_trainer.checkpoint.dividing import INDEX_FORMAT, ITEM_BYTES, Box, Scheme, header_of
from trainium_trainer.checkpoint.format.live_state import box_of, flatten, local_of
from trainium_trainer.checkpoint.format.shards import SAFETENSORS_TYPES
from trainium_trainer.storage.errors import DamagedFileError
from trainium_trainer.storage.protocol import Retry, Storage, read_part, read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainium_trainer.checkpoint.interfaces import TrainingState
    from trainium_trainer.checkpoint.root.survey import Committed


TORCH_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}
_DIGEST = 64
"""Characters of a block's digest."""


@dataclass(frozen=True, slots=True)
class WrittenBox:
    """A box of a tensor as one rank wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """In the file, bytes."""
    length: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def open_index(storage: Storage, checkpoint: Committed, retry: Retry) -> Index:
    """Read the index of a checkpoint. DamagedFileError when it is not what was written."""
    digests = {file.name: file.digest for file in checkpoint.manifest.files}

    def read(name: str) -> dict[str, Any]:
        path = f"{checkpoint.folder}/{name}"
        data = retry.run(lambda: read_small(storage, path), storage.location)
        if data is None or digest_of(data) != digests.get(name):
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
        return Index(checkpoint.folder, Scheme.from_json(raw), list(digests), read)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DamagedFileError(f"{path} is not an index") from error


@dataclass(frozen=True, slots=True)
class _File:
    """A file; small, because one reader may need those of 4,096 ranks."""

    starts: array[int]
    """Start of each tensor's box in it, by the tensor's number; 0 where it has none."""
    size: int
    blocks: list[str]


class Index:
    """The places of all tensors of a checkpoint."""

    def __init__(self, folder: str, scheme: Scheme, names: list[str], read: Callable[[str], dict[str, Any]]) -> None:
        """`names`: at least those of the tables in the folder; `read` gives a verified table."""
        self._folder = folder
        self._scheme = scheme
        self._read = read
        prefix, suffix = blocks_name(0).split(f"{0:05d}")
        self._firsts = sorted(int(name[len(prefix) : -len(suffix)]) for name in names if name.startswith(prefix))
        self._numbers = {name: number for number, name in enumerate(scheme.tensors)}
        self._tables: dict[int, dict[str, Any]] = {}
        self._files: dict[str, _File] = {}
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(TORCH_TYPES[tensor.dtype], tensor.shape) for name, tensor in scheme.tensors.items()
        }

    def parts(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[WrittenBox]:
        """Yield the written parts of a tensor that share values with a box. DamagedFileError, StorageError."""
        for box, rank in self._scheme.writers(name, Box(offsets, sizes)):
            start = self._file(rank).starts[self._numbers[name]]
            length = box.volume * ITEM_BYTES[self._scheme.tensors[name].dtype]
            yield WrittenBox(box.offsets, box.sizes, shard_name(rank), start, length)

    def blocks(self, file: str) -> tuple[int, list[str]]:
        """Return the size of a file of one of the parts, and the digests of its blocks."""
        found = self._files[file]
        return found.size, found.blocks

    def _file(self, rank: int) -> _File:
        name = shard_name(rank)
        if name not in self._files:
            items = self._scheme.file(rank)
            header, spans = header_of(items)
            try:
                entry = self._table(rank)["files"][name]
                size, blocks = int(entry["size"]), str(entry["blocks"])
                if hashlib.sha256(header).hexdigest() != entry["header"] or spans[-1][1] != size:
                    raise DamagedFileError(f"{self._folder}/{name} is not divided as in {INDEX_NAME}")
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise DamagedFileError(f"{self._folder} has no description of {name}") from error
            digests = [blocks[at : at + _DIGEST] for at in range(0, len(blocks), _DIGEST)]
            starts = array("Q", bytes(8 * len(self._numbers)))
            for item, (start, _) in zip(items, spans, strict=True):
                starts[self._numbers[item.name]] = start
            self._files[name] = _File(starts, size, digests)
        return self._files[name]

    def _table(self, rank: int) -> dict[str, Any]:
        """Return the table that has a rank's digests."""
        at = bisect_right(self._firsts, rank) - 1
        if at < 0:
            raise KeyError(rank)
        first = self._firsts[at]
        if first not in self._tables:
            self._tables[first] = self._read(blocks_name(first))
        return self._tables[first]


_EXTENT_BLOCKS = 4
_CHUNK_BYTES = _EXTENT_BLOCKS * BLOCK_BYTES
_THREADS = 4
_KEPT_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """A box of a part that is to be copied into `target`, which has the box's shape."""

    part: WrittenBox
    dtype: torch.dtype
    offsets: tuple[int, ...]
    """Within the part."""
    target: torch.Tensor


@dataclass(slots=True)
class _Chunk:
    """Some rows of a wanted box: a stretch of a file, and where its bytes go."""

    start: int
    end: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    """Shape of the stored rows."""
    offsets: tuple[int, ...]
    """Start of the wanted box in the stored rows, for all dimensions but the first."""
    target: torch.Tensor
    missing: int
    sink: torch.Tensor | None = field(default=None)
    """The bytes: the target's own memory, or a buffer until all are there."""


class Contents:
    """The tensors of one committed checkpoint in one folder."""

    def __init__(self, storage: Storage, checkpoint: Committed, retry: Retry) -> None:
        """Read the index. DamagedFileError when it is not whole, StorageError when it cannot be read."""
        self._storage = storage
        self._folder = checkpoint.folder
        self._retry = retry
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        """Verified blocks by file and number, the newest last."""
        self._turn = threading.Lock()
        self._index = open_index(storage, checkpoint, retry)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by name."""
        return self._index.tensors

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor, on the CPU; KeyError when the checkpoint has none of that name."""
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill(self.wanted(name, (0,) * len(stored.shape), whole))
        return whole

    def wanted(self, name: str, offsets: tuple[int, ...], target: torch.Tensor) -> list[Wanted]:
        """Return what has to be read for the box of `target`'s size that begins at `offsets` in a tensor.

        KeyError when the checkpoint has no tensor of that name; DamagedFileError when not all of the box is there.
        """
        stored = self.tensors[name]
        found: list[Wanted] = []
        values = 0
        for part in self._index.parts(name, offsets, tuple(target.shape)):
            box, inside = target, []
            for dimension, (begin, theirs, length) in enumerate(zip(offsets, part.offsets, part.sizes, strict=True)):
                low = max(begin, theirs)
                high = min(begin + target.shape[dimension], theirs + length)
                box = box.narrow(dimension, low - begin, high - low)
                inside.append(low - theirs)
            values += box.numel()
            found.append(Wanted(part, stored.dtype, tuple(inside), box))
        if values != target.numel():
            raise DamagedFileError(f"{self._folder} has {values} of the {target.numel()} values of a part of {name}")
        return found

    @torch.no_grad()
    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Fill all targets. DamagedFileError when a file is not what was written; the targets are then undefined.

        Of several threads one is served at a time: the next finds the blocks that the last one kept.
        """
        with self._turn:
            self._fill(wanted)

    def _fill(self, wanted: Sequence[Wanted]) -> None:
        by_file: dict[str, list[_Chunk]] = {}
        for each in wanted:
            by_file.setdefault(each.part.file, []).extend(_chunks(each))
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-read") as pool:
            lock = threading.Lock()
            work = [
                pool.submit(self._read_extent, name, first, last, touched, lock)
                for name, chunks in by_file.items()
                for first, last, touched in _extents(sorted(chunks, key=lambda chunk: chunk.start))
            ]
            try:
                for each_read in work:
                    each_read.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _read_extent(self, name: str, first: int, last: int, chunks: list[_Chunk], lock: threading.Lock) -> None:
        path = f"{self._folder}/{name}"
        size, digests = self._index.blocks(name)
        base, end = first * BLOCK_BYTES, min(size, last * BLOCK_BYTES)
        buffer = torch.empty(max(0, end - base), dtype=torch.uint8)
        view = buffer.numpy().data
        with lock:
            known = self._kept.pop((name, first), None)
        if known is not None:
            view[: len(known)] = known
        verified = 0 if known is None else len(known)
        if verified < len(view):
            read_part(self._storage, path, base + verified, view[verified:], self._retry)
        for number in range(first if known is None else first + 1, last):
            at = number * BLOCK_BYTES - base
            if block_digest([view[at : at + BLOCK_BYTES]]) != digests[number]:
                raise DamagedFileError(f"{path} does not have the contents that were written")
        if max(chunk.end for chunk in chunks) < end:
            self._keep(name, last - 1, view[(last - 1) * BLOCK_BYTES - base :], lock)
        for chunk in chunks:
            low, high = max(chunk.start, base), min(chunk.end, end)
            with lock:
                if chunk.sink is None:
                    chunk.sink = _sink(chunk)
            # Plain bytes: torch would start more threads for each copy, in each of these threads.
            chunk.sink.numpy().data[low - chunk.start : high - chunk.start] = view[low - base : high - base]
            with lock:
                chunk.missing -= high - low
                done = chunk.missing == 0
            if done:
                _deliver(chunk)

    def _keep(self, name: str, number: int, block: memoryview, lock: threading.Lock) -> None:
        """Remember a block of which a part was not wanted yet."""
        copy = bytes(block)
        with lock:
            self._kept[name, number] = copy
            while len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)


def load(storage: Storage, checkpoint: Committed, state: TrainingState, retry: Retry) -> None:
    """Fill the live state from a committed checkpoint of any size, verifying what is read; local, no collectives.

    Raises DamagedFileError and StorageError, and ValueError where the checkpoint holds another state.
    """
    contents = Contents(storage, checkpoint, retry)
    live = state.state_dict()
    wanted: list[Wanted] = []
    for name, value in flatten(live).items():
        stored = contents.tensors.get(name)
        if stored is None:
            raise DamagedFileError(f"{checkpoint.folder} has no {name}")
        if stored.shape != tuple(value.shape):
            raise ValueError(f"{name} has the size {list(stored.shape)} there and {list(value.shape)} here")
        box = box_of(value)
        if box.volume:
            wanted += contents.wanted(name, box.offsets, local_of(value))
    contents.fill(wanted)
    state.load_state_dict(live)


def _chunks(wanted: Wanted) -> Iterator[_Chunk]:
    """Yield the stretches of rows of a box."""
    part, target = wanted.part, wanted.target
    if target.numel() == 0:
        return
    if not part.sizes:
        yield _Chunk(part.start, part.start + part.length, wanted.dtype, (), (), target, part.length)
        return
    row = part.length // part.sizes[0]
    most = max(1, _CHUNK_BYTES // row)
    rows = target.shape[0]
    for at in range(0, rows, most):
        count = min(most, rows - at)
        start = part.start + (wanted.offsets[0] + at) * row
        yield _Chunk(
            start=start,
            end=start + count * row,
            dtype=wanted.dtype,
            sizes=(count, *part.sizes[1:]),
            offsets=wanted.offsets[1:],
            target=target.narrow(0, at, count),
            missing=count * row,
        )


def _extents(chunks: list[_Chunk]) -> Iterator[tuple[int, int, list[_Chunk]]]:
    """Yield runs of neighbouring blocks of one file with the chunks that lie in them; chunks come by their start."""
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


def _sink(chunk: _Chunk) -> torch.Tensor:
    """Return the target's own bytes where the stored rows lie in it as they are; else a buffer."""
    target = chunk.target
    if (
        target.device.type == "cpu"
        and target.dtype == chunk.dtype
        and target.is_contiguous()
        and tuple(target.shape) == chunk.sizes
    ):
        return target.reshape(-1).view(torch.uint8)
    return torch.empty(chunk.end - chunk.start, dtype=torch.uint8)


def _deliver(chunk: _Chunk) -> None:
    """Copy a buffer into its target, if there is one."""
    assert chunk.sink is not None
    tensor = chunk.sink.view(chunk.dtype).view(chunk.sizes)
    if tensor.data_ptr() != chunk.target.data_ptr():
        for dimension, offset in enumerate(chunk.offsets, start=1):
            tensor = tensor.narrow(dimension, offset, chunk.target.shape[dimension])
        chunk.target.copy_(tensor)
    chunk.sink = None
