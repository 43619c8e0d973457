"""Where the tensors of a checkpoint lie, by the scheme that its index holds.

The index describes how tensors are divided. Where a part lies is derived from that, for the files that are asked for
and no others, and compared with the digest of each file's header.

Guarantees:
- What is read here is verified by the manifest before it is used.
- What is parsed grows with the files that are read, not with the number of ranks that wrote.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.checkpoint_manifest import BLOCK_BYTES, INDEX_NAME, blocks_name, digest_of, shard_name
from trainium_trainer.checkpoint.dividing.cuts import Box
from trainium_trainer.checkpoint.dividing.scheme import ITEM_BYTES, Scheme
from trainium_trainer.checkpoint.format.shards import (
    INDEX_FORMAT,
    SAFETENSORS_TYPES,
    header_of,
)
from trainium_trainer.storage.errors import DamagedFileError
from trainium_trainer.storage.protocol import Retry, Storage, read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

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
