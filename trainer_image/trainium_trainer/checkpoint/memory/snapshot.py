"""Snapshots of the trainer's shards: their layout, identity and header, and the files that rotate.

The files are those of `trainium_worker.snapshot`; their headers name the shard, the version and the layout.

Guarantees:
- In a payload, tensors lie in the order of their names at offsets that are multiples of 64 bytes. The payload is a
  multiple of the checksum's block, so that no byte is outside a block.
- Equal layouts have equal digests on all machines.
- File names are `g<generation>-<shard>-<random>.snapshot`.
- The oldest file is used next, unfinished ones first.
- Files that earlier processes left for the shard are reused when they fit and removed otherwise.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_trainer.checkpoint.interfaces import Position
from trainium_worker import snapshot
from trainium_worker.snapshot import BLOCK_BYTES, HEADER_BYTES, DamagedSnapshotError, checksum

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """The part of the state that a snapshot holds; replicas share one key (their data-parallel part is 0 of 1)."""

    tp_rank: int
    tp_size: int
    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def has_same_layout(self, other: ShardKey) -> bool:
        """Return whether both keys belong to the same division of the state."""
        return (self.tp_size, self.dp_size, self.pp_size) == (other.tp_size, other.dp_size, other.pp_size)

    def __str__(self) -> str:
        stage = f"p{self.pp_rank}of{self.pp_size}" if self.pp_size > 1 else ""
        return f"t{self.tp_rank}of{self.tp_size}-d{self.dp_rank}of{self.dp_size}{stage}"


@dataclass(frozen=True, slots=True, order=True)
class StateVersion:
    """One state of the whole run: a position reached by one session."""

    position: Position
    generation: int
    session: str


@dataclass(frozen=True, slots=True, order=True)
class SnapshotRecord:
    """The identity and checksum of a snapshot in a store."""

    version: StateVersion
    key: ShardKey
    layout: str
    """Digest of names, shapes and types of the shard's tensors."""
    checksum: str


_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _TensorSpan:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The layout of a snapshot's payload."""

    parts: tuple[_TensorSpan, ...]
    payload_bytes: int
    digest: str

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> BufferLayout:
        """Return the layout of these tensors, which depends only on names, types and shapes."""
        parts: list[_TensorSpan] = []
        offset = 0
        for name in sorted(tensors):
            tensor = tensors[name]
            end = offset + tensor.numel() * tensor.element_size()
            parts.append(_TensorSpan(name, tensor.dtype, tuple(tensor.shape), offset, end))
            offset = _round_up(end, _ALIGNMENT)
        text = "\n".join(f"{part.name} {part.dtype} {part.shape}" for part in parts)
        return BufferLayout(
            parts=tuple(parts),
            payload_bytes=max(BLOCK_BYTES, _round_up(offset, BLOCK_BYTES)),
            digest=hashlib.sha256(text.encode()).hexdigest()[:32],
        )

    def views(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Return typed views into a payload buffer, in the layout's order."""
        return [payload[part.start : part.end].view(part.dtype).view(part.shape) for part in self.parts]

    def ordered(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors in the layout's order. Raises KeyError when one is missing."""
        return [tensors[part.name].detach() for part in self.parts]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Header:
    """The identity of a snapshot and the size of its payload."""

    record: SnapshotRecord
    config_digest: str
    payload_bytes: int

    def encode(self) -> bytes:
        """Serialize the header as the text of the header page."""
        version, key = self.record.version, self.record.key
        return json.dumps(
            {
                "step": version.position.step,
                "samples": version.position.samples,
                "tokens": version.position.tokens,
                "loss": version.position.loss,
                "gradNorm": version.position.grad_norm,
                "batch": version.position.batch,
                "generation": version.generation,
                "session": version.session,
                "key": [key.tp_rank, key.tp_size, key.dp_rank, key.dp_size, key.pp_rank, key.pp_size],
                "layout": self.record.layout,
                "checksum": self.record.checksum,
                "config": self.config_digest,
                "payloadBytes": self.payload_bytes,
            }
        ).encode()

    @staticmethod
    def decode(text: bytes, name: str) -> Header:
        """Parse the result of `encode`. Raises DamagedSnapshotError for a text of another format."""
        try:
            raw: dict[str, Any] = json.loads(text)
            position = Position(
                step=raw["step"],
                samples=raw["samples"],
                tokens=raw["tokens"],
                loss=raw["loss"],
                grad_norm=raw["gradNorm"],
                batch=raw.get("batch"),
            )
            version = StateVersion(position, raw["generation"], raw["session"])
            record = SnapshotRecord(version, ShardKey(*raw["key"]), raw["layout"], raw["checksum"])
            return Header(record, raw["config"], raw["payloadBytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedSnapshotError(f"{name}: the header is of another format") from error


def read_header(path: Path) -> Header | None:
    """Read the header of a finished snapshot, None for an unfinished one. Raises DamagedSnapshotError."""
    text = snapshot.read_header(path)
    if text is None:
        return None
    header = Header.decode(text, path.name)
    payload_bytes = path.stat().st_size - HEADER_BYTES
    if payload_bytes != header.payload_bytes:
        raise DamagedSnapshotError(
            f"{path.name}: {HEADER_BYTES + payload_bytes} bytes where {HEADER_BYTES + header.payload_bytes} belong"
        )
    return header


class SnapshotFile(snapshot.SnapshotFile):
    """A snapshot file of a shard, open for writing."""

    def __init__(self, path: Path, payload_bytes: int, header: Header | None) -> None:
        super().__init__(path, payload_bytes)
        self.header = header
        self._pinned = False

    @staticmethod
    def create(path: Path, payload_bytes: int) -> SnapshotFile:
        """Create an unfinished snapshot with all of its space reserved. Raises OSError when there is no space."""
        snapshot.reserve(path, payload_bytes)
        return SnapshotFile(path, payload_bytes, None)

    def pin(self) -> None:
        """Page-lock the payload until the process ends, so that a CUDA device can copy into it while it computes."""
        if not self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostRegister(self.payload.data_ptr(), self.payload.numel(), 0)
            self._pinned = True

    def invalidate(self, path: Path) -> None:
        """Mark the file as unfinished and rename it for its next owner."""
        super().invalidate(path)
        self.header = None

    def finalize(self, version: StateVersion, key: ShardKey, layout: str, config_digest: str) -> SnapshotRecord:
        """Compute the checksum of the payload and mark the file as finished."""
        record = SnapshotRecord(version, key, layout, checksum(self.payload))
        header = Header(record, config_digest, self.payload_bytes)
        self.write_header(header.encode())
        self.header = header
        return record


SUFFIX = ".snapshot"


class SnapshotSlots:
    """The files of one shard in one folder, written by one process."""

    def __init__(self, directory: Path, key: ShardKey, *, generation: int, count: int) -> None:
        self.key = key
        self._directory = directory
        self._generation = generation
        self._count = count
        self._files: list[SnapshotFile] = []

    def open(self, *, layout: str, payload_bytes: int, headers: Mapping[Path, Header]) -> None:
        """Reserve the files; `headers` are those of finished files. Raises OSError when there is no space."""
        try:
            if not self._files:
                self._adopt(layout, payload_bytes, headers)
            while len(self._files) < self._count:
                self._files.append(SnapshotFile.create(self._directory / self._name(), payload_bytes))
        except OSError:
            for slot in self._files:
                if slot.header is None:
                    slot.path.unlink(missing_ok=True)
            self._files.clear()
            raise

    def next(self) -> SnapshotFile:
        """Return the oldest file, marked as unfinished and renamed for this process."""
        slot = min(self._files, key=_age_order)
        slot.invalidate(self._directory / self._name())
        return slot

    def discard_after(self, step: int) -> None:
        """Invalidate the snapshots of later steps."""
        for slot in self._files:
            if slot.header is not None and slot.header.record.version.position.step > step:
                slot.invalidate(slot.path)

    def drop(self, path: Path) -> None:
        """Mark the file at `path` as unfinished, if it is one of these."""
        for slot in self._files:
            if slot.path == path:
                slot.invalidate(path)

    def close(self) -> None:
        """Unmap the files."""
        self._files.clear()

    def _name(self) -> str:
        return f"g{self._generation}-{self.key}-{secrets.token_hex(4)}{SUFFIX}"

    def _adopt(self, layout: str, payload_bytes: int, headers: Mapping[Path, Header]) -> None:
        self._files = [
            SnapshotFile(path, payload_bytes, header)
            for path, header in headers.items()
            if header.record.key == self.key
            and header.record.layout == layout
            and header.payload_bytes == payload_bytes
        ]
        for path in self._directory.glob(f"g*-{self.key}-*{SUFFIX}"):
            if all(slot.path != path for slot in self._files):
                path.unlink(missing_ok=True)
        self._files.sort(key=_age_order)
        for extra in self._files[: -self._count]:
            extra.path.unlink(missing_ok=True)
        self._files = self._files[-self._count :]


def key_text(path: Path) -> str:
    """Return the shard part of a file name `g<generation>-<shard>-<random>.snapshot`."""
    return path.name.partition("-")[2].rpartition("-")[0]


def _age_order(slot: SnapshotFile) -> tuple[bool, int, int]:
    """Sort unfinished files first, then by age."""
    if slot.header is None:
        return (False, 0, 0)
    version = slot.header.record.version
    return (True, version.position.step, version.generation)
