"""The files of a durable checkpoint, as writer and reader for torch's distributed checkpoint (DCP).

DCP plans who writes and reads which part and so reshards to any size; the bytes are ours: every rank writes one
`shard-<rank>.safetensors` that any safetensors reader opens, and `index.json` says which part of which tensor lies
where. Invariants: no pickle is ever read from storage; each file is hashed while it is written, and its size and digest
travel to the coordinator with DCP's own result messages, so a commit needs no further communication.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trainium_contract.manifest import ManifestFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.checkpoint.storage import Retry, Storage

INDEX_NAME = "index.json"
_PIECE_BYTES = 4 << 20
_SAFETENSORS_TYPES = {
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
_TORCH_TYPES = {name: dtype for dtype, name in _SAFETENSORS_TYPES.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one part of a tensor lies."""

    file: ManifestFile
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
        index = json.dumps(_index(metadata, written), separators=(",", ":")).encode()

        def write() -> None:
            with self._storage.open_write(f"{self._folder}/{INDEX_NAME}") as file:
                file.write(index)

        self._retry.run(write, f"{self._storage.location}/{self._folder}")
        files = {result.storage_data.file.name: result.storage_data.file for result in written}
        files[INDEX_NAME] = ManifestFile(name=INDEX_NAME, size=len(index), digest=hashlib.sha256(index).hexdigest())
        self._commit([files[name] for name in sorted(files)])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - DCP's signature
        """Any id; it is not used."""
        return True

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        header, spans = _header(items)
        digest = hashlib.sha256(header)
        with self._storage.open_write(f"{self._folder}/{name}") as file:
            file.write(header)
            for item in items:
                data: Any = planner.resolve_data(item)
                _write_tensor(file, digest, data.detach())
        size = spans[-1][1]
        report = ManifestFile(name=name, size=size, digest=digest.hexdigest())
        return [
            WriteResult(index=item.index, size_in_bytes=end - start, storage_data=Place(report, start, end - start))
            for item, (start, end) in zip(items, spans, strict=True)
        ]


class ShardReader(StorageReader):
    """Reads a checkpoint that `ShardWriter` wrote, at any size."""

    def __init__(self, storage: Storage, folder: str) -> None:
        super().__init__()
        self._storage = storage
        self._folder = folder
        self._places: dict[MetadataIndex, Place] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a reader reads one checkpoint."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The contents of `index.json`; OSError or ValueError when it cannot be read."""
        with self._storage.open_read(f"{self._folder}/{INDEX_NAME}") as file:
            raw = json.loads(file.read())
        tensors: dict[str, Any] = {}
        for name, entry in raw["tensors"].items():
            chunks: list[ChunkStorageMetadata] = []
            for part in entry["parts"]:
                offsets = torch.Size(part["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(part["sizes"])))
                report = ManifestFile(name=part["file"], size=0, digest="")
                self._places[MetadataIndex(name, offsets)] = Place(report, part["start"], part["bytes"])
            properties = TensorProperties(dtype=_TORCH_TYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        self._types = {name: value.properties.dtype for name, value in tensors.items()}
        self._sizes = {
            MetadataIndex(name, chunk.offsets): chunk.sizes for name, value in tensors.items() for chunk in value.chunks
        }
        return Metadata(state_dict_metadata=tensors, storage_data=self._places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The planner's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The planners' plans as they are."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise ValueError(f"{item.storage_index.fqn}: checkpoints hold tensors only")
            by_file.setdefault(self._places[item.storage_index].file.name, []).append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: self._places[item.storage_index].start)
            with self._storage.open_read(f"{self._folder}/{name}") as file:
                for item in items:
                    target: torch.Tensor = planner.resolve_tensor(item).detach()
                    target.copy_(self._read_part(file, item))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - DCP's signature
        """Any id; it is not used."""
        return True

    def _read_part(self, file: BinaryIO, item: ReadItem) -> torch.Tensor:
        """The wanted box of a stored part; only the wanted rows are read."""
        place, dtype = self._places[item.storage_index], self._types[item.storage_index.fqn]
        sizes = list(self._sizes[item.storage_index])
        start, length = place.start, place.length
        offsets, lengths = list(item.storage_offsets), list(item.lengths)
        if sizes and sizes[0]:
            row = length // sizes[0]
            start, length = start + offsets[0] * row, lengths[0] * row
            sizes[0], offsets[0] = lengths[0], 0
        file.seek(start)
        buffer = bytearray(length)
        if file.readinto(buffer) != length:  # type: ignore[attr-defined]
            raise ValueError(f"{self._folder}/{place.file.name} ends too early")
        if length == 0:
            return torch.empty(lengths, dtype=dtype)
        tensor = torch.frombuffer(buffer, dtype=dtype).view(sizes)
        for dimension, (offset, size) in enumerate(zip(offsets, lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, size)
        return tensor


def _giving_way(work: Callable[[], list[WriteResult]]) -> list[WriteResult]:
    """The outcome of `work`, done at a low priority so that training goes first.

    Hashing and writing are most of a save's work and hold no lock that training needs. The thread is a daemon: a store
    that hangs must not keep the process from leaving.
    """
    outcome: list[list[WriteResult] | BaseException] = []

    def run() -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
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


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _properties(item: WriteItem) -> TensorProperties:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor: state_dict() must hold tensors only")
    return item.tensor_data.properties


def _header(items: list[WriteItem]) -> tuple[bytes, list[tuple[int, int]]]:
    """The safetensors header of a file and each item's start and end in it, bytes."""
    entries: dict[str, Any] = {}
    offset = 0
    for item in items:
        data = item.tensor_data
        assert data is not None
        whole = data.chunk.sizes == data.size
        name = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
        end = offset + data.chunk.sizes.numel() * data.properties.dtype.itemsize
        entries[name] = {
            "dtype": _SAFETENSORS_TYPES[data.properties.dtype],
            "shape": list(data.chunk.sizes),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    spans = [(base + entry["data_offsets"][0], base + entry["data_offsets"][1]) for entry in entries.values()]
    return len(text).to_bytes(8, "little") + text, spans


def _write_tensor(file: BinaryIO, digest: Any, tensor: torch.Tensor) -> None:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        digest.update(piece)
        file.write(piece)


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
        dtype = _SAFETENSORS_TYPES[entry.properties.dtype]
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "parts": parts}
    return {"format": 1, "tensors": tensors}
