"""The files of a durable checkpoint, as writer and reader for torch's distributed checkpoint (DCP).

DCP plans who writes and reads which part and so reshards to any size; the bytes are ours: every rank writes one
`shard-<rank>.safetensors` that any safetensors reader opens, and `index.json` says which part of which tensor lies
where, and the digest of each block of each file. Invariants: no pickle is ever read from storage; a file is hashed
while it is written and verified while it is read, block by block, so either takes one pass; size and digests travel to
the coordinator with DCP's own result messages, so a commit needs no further communication.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainium_contract.manifest import BLOCK_BYTES, ManifestFile, block_digest, digest_of, file_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future as Promise

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from trainium_trainer.checkpoint.storage import Retry, Storage

INDEX_NAME = "index.json"
INDEX_FORMAT = 2
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LOW_PRIORITY = 10


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file as it was written."""

    name: str
    size: int
    blocks: tuple[str, ...]
    """Digests of its blocks."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one part of a tensor lies."""

    file: WrittenFile
    start: int
    length: int


class ShardWriter(StorageWriter):
    """Writes one checkpoint into one folder; `commit` runs on the coordinator once all ranks' files are written."""

    def __init__(
        self, storage: Storage, folder: str, retry: Retry, commit: Callable[[list[ManifestFile]], None]
    ) -> None:
        super().__init__()
        self._storage = storage
        self._folder = folder
        self._retry = retry
        self._commit = commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The planner's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The planners' plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; StorageError when that fails for good."""
        future: Future[list[WriteResult]] = Future()
        name = f"shard-{_rank():05d}.safetensors"
        # Wide types first keeps every tensor aligned.
        items = sorted(plan.items, key=lambda item: -_properties(item).dtype.itemsize)
        where = f"{self._storage.location}/{self._folder}"
        results: list[WriteResult] = []
        if items:
            results = _giving_way(lambda: self._retry.run(lambda: self._write_file(name, items, planner), where))
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after the last rank's last write: the index, then the commit."""
        written = [result for of_rank in results for result in of_rank]
        files = {file.name: file for file in (result.storage_data.file for result in written)}
        self._commit(write_index(self._storage, self._folder, _index(metadata, written), files.values(), self._retry))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - DCP's signature
        """Any id; it is not used."""
        return True

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        header, spans = header_of([_entry(item) for item in items])
        views = [memoryview(header), *(bytes_of(planner.resolve_data(item)) for item in items)]
        file = write_hashed(self._storage, self._folder, name, views, spans[-1][1])
        return [
            WriteResult(index=item.index, size_in_bytes=end - start, storage_data=Place(file, start, end - start))
            for item, (start, end) in zip(items, spans, strict=True)
        ]


def write_index(
    storage: Storage, folder: str, index: dict[str, Any], files: Iterable[WrittenFile], retry: Retry
) -> list[ManifestFile]:
    """Write `index.json`; the manifest's entries of it and of the files that it names."""
    data = json.dumps(index, separators=(",", ":")).encode()
    retry.run(
        lambda: storage.write_stream(f"{folder}/{INDEX_NAME}", [memoryview(data)], len(data)),
        f"{storage.location}/{folder}",
    )
    entries = [ManifestFile(name=file.name, size=file.size, digest=file_digest(file.blocks)) for file in files]
    entries.append(ManifestFile(name=INDEX_NAME, size=len(data), digest=digest_of(data)))
    return sorted(entries, key=lambda entry: entry.name)


def write_hashed(storage: Storage, folder: str, name: str, views: Iterable[memoryview], size: int) -> WrittenFile:
    """Write a file of `size` bytes; the digest of a block is computed while the store writes it."""
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash", initializer=_lower_priority) as pool:
        digests: list[Promise[str]] = []

        def pieces() -> Iterator[memoryview]:
            for block in blocks_of(views):
                digests.append(pool.submit(block_digest, block))
                yield from block

        storage.write_stream(f"{folder}/{name}", pieces(), size)
        return WrittenFile(name, size, tuple(digest.result() for digest in digests))


def blocks_of(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The bytes of the views one after the other, cut into blocks of BLOCK_BYTES; each block is a list of pieces."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for view in views:
        at = 0
        while at < len(view):
            piece = view[at : at + room]
            block.append(piece)
            at += len(piece)
            room -= len(piece)
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


def _giving_way(work: Callable[[], list[WriteResult]]) -> list[WriteResult]:
    """The outcome of `work`, done at a low priority so that training goes first.

    Hashing and writing are most of a save's work and hold no lock that training needs. The thread is a daemon: a store
    that hangs must not keep the process from leaving.
    """
    outcome: list[list[WriteResult] | BaseException] = []

    def run() -> None:
        _lower_priority()
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=run, name="checkpoint-write", daemon=True)
    thread.start()
    thread.join()
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result


def _lower_priority() -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _properties(item: WriteItem) -> TensorProperties:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor: state_dict() must hold tensors only")
    return item.tensor_data.properties


def _entry(item: WriteItem) -> tuple[str, torch.dtype, torch.Size]:
    """Name, type and size of one part of a tensor."""
    data = item.tensor_data
    assert data is not None
    whole = data.chunk.sizes == data.size
    name = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
    return name, data.properties.dtype, data.chunk.sizes


def header_of(parts: Sequence[tuple[str, torch.dtype, torch.Size]]) -> tuple[bytes, list[tuple[int, int]]]:
    """The safetensors header of a file and each part's start and end in it, bytes."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, dtype, sizes in parts:
        end = offset + sizes.numel() * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_TYPES[dtype], "shape": list(sizes), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    spans = [(base + entry["data_offsets"][0], base + entry["data_offsets"][1]) for entry in entries.values()]
    return len(text).to_bytes(8, "little") + text, spans


def bytes_of(tensor: Any) -> memoryview:
    """A tensor's bytes, sharing its memory when it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view


def _index(metadata: Metadata, written: list[WriteResult]) -> dict[str, Any]:
    places = {(result.index.fqn, result.index.offset): result.storage_data for result in written}
    tensors: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is not a tensor: state_dict() must hold tensors only")
        parts: list[dict[str, Any]] = []
        for chunk in entry.chunks:
            place = places[name, chunk.offsets]
            parts.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": place.file.name,
                    "start": place.start,
                    "bytes": place.length,
                }
            )
        dtype = SAFETENSORS_TYPES[entry.properties.dtype]
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "parts": parts}
    return index_of(tensors, [place.file for place in places.values()])


def index_of(tensors: dict[str, Any], files: Iterable[WrittenFile]) -> dict[str, Any]:
    """What `index.json` holds."""
    entries = {file.name: {"size": file.size, "blocks": list(file.blocks)} for file in files}
    return {"format": INDEX_FORMAT, "blockBytes": BLOCK_BYTES, "files": entries, "tensors": tensors}
