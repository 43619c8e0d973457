"""A snapshot: one part of the state of a step in a file in memory, which is a header page and the mapped payload.

Guarantees:
- A file is valid only while its header is intact and has the payload's checksum.
- The header is cleared before the payload changes and written after the checksum is computed, magic last, so a process
  killed at any time leaves either a valid snapshot or one marked as unfinished.
- The space is reserved when the file is created, so that a full memory volume is an error there and never a bus error
  during a step.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

HEADER_BYTES = 4096
BLOCK_BYTES = 4096
"""The size of a payload is a multiple of it, so that no byte is outside a block of the checksum."""
ALIGNMENT_BYTES = 64
"""The offset of a tensor in a payload is a multiple of it."""
SUFFIX = ".snapshot"
_MAGIC = b"TRNSNAP1"
_HEADER_START = 16
_WORDS_PER_BLOCK = BLOCK_BYTES // 8


def round_up(value: int, multiple: int) -> int:
    """Round a value up to the next multiple."""
    return -(-value // multiple) * multiple


class DamagedSnapshotError(Exception):
    """A finished snapshot whose bytes are not what was written."""


@dataclass(frozen=True, order=True)
class Version:
    """One state of the whole job, which its parts have in common; ordered by age."""

    step: int
    generation: int
    session: str
    """The processes that wrote it: two sessions may have reached one step with different states."""
    details: str = field(default="", compare=False)
    """Further facts of the state, recorded by its writer."""


@dataclass(frozen=True, order=True)
class Part:
    """A part of a state: its identity, and the size and checksum of its bytes."""

    version: Version
    name: str
    """The part of the state; ranks that hold the same part share a name."""
    layout: str
    """Layout of the payload, defined by its writer."""
    payload_bytes: int
    checksum: str = ""

    def to_page(self) -> bytes:
        """Return the header page of a finished snapshot."""
        header = json.dumps({**vars(self), "version": vars(self.version)}).encode()
        if len(header) > HEADER_BYTES - _HEADER_START:
            raise ValueError(f"the header of a snapshot has {len(header)} bytes: {header[:80]!r}")
        return _MAGIC + len(header).to_bytes(4, "little") + zlib.crc32(header).to_bytes(4, "little") + header

    @staticmethod
    def from_page(page: bytes, where: str) -> Part | None:
        """Parse a header page; None for an unfinished snapshot. Raises DamagedSnapshotError."""
        if page[:8] != _MAGIC:
            return None
        length = int.from_bytes(page[8:12], "little")
        header = page[_HEADER_START : _HEADER_START + length]
        if zlib.crc32(header) != int.from_bytes(page[12:16], "little"):
            raise DamagedSnapshotError(f"{where}: the header is altered")
        try:
            values: dict[str, Any] = json.loads(header)
            part = Part(**{**values, "version": Version(**values["version"])})
            is_valid = min(part.payload_bytes, part.version.step, part.version.generation) >= 0
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedSnapshotError(f"{where}: the header is of another format") from error
        if not is_valid:
            raise DamagedSnapshotError(f"{where}: the header is of another format")
        return part


@torch.no_grad()
def checksum(payload: torch.Tensor) -> str:
    """Return a hash of the sums of 4 KiB blocks of 64-bit integers.

    A flipped bit, a torn block or swapped blocks change it. It runs at memory speed (27 GB/s on one core where
    zlib.crc32 reaches 2.1 and SHA-256 1.1), without the interpreter lock, so that a snapshot every step is affordable.
    It does not guard against an adversary; durable checkpoints use SHA-256.
    """
    sums = payload.view(torch.int64).view(-1, _WORDS_PER_BLOCK).sum(dim=1)
    return hashlib.sha256(sums.numpy().data).hexdigest()[:32]


class SnapshotFile:
    """A snapshot file open for writing, its payload mapped as a tensor of bytes."""

    def __init__(self, path: Path, part: Part | None = None) -> None:
        """`part`: the finished snapshot in the file."""
        self.path = path
        self.part = part
        descriptor = os.open(path, os.O_RDWR)
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags)
        finally:
            os.close(descriptor)
        self.page, self.payload = torch.frombuffer(self._map, dtype=torch.uint8).tensor_split([HEADER_BYTES])
        self._is_pinned = False

    @staticmethod
    def create(path: Path, payload_bytes: int) -> SnapshotFile:
        """Create an unfinished snapshot with all of its space reserved. Raises OSError if there is no space."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + payload_bytes)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return SnapshotFile(path)

    @property
    def capacity(self) -> int:
        """The size of the largest payload."""
        return self.payload.numel()

    def pin(self) -> None:
        """Page-lock the payload until the process ends, so that a CUDA device can copy into it while it computes."""
        if not self._is_pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostRegister(self.payload.data_ptr(), self.payload.numel(), 0)
            self._is_pinned = True

    def invalidate(self, path: Path | None = None) -> None:
        """Mark the file as unfinished, and rename it for its next owner."""
        self._map[:8] = bytes(8)
        self.part = None
        if path is not None:
            self.path.rename(path)
            self.path = path

    def finish(self, part: Part) -> Part:
        """Compute the checksum of the payload, mark the file as finished and return the part with its checksum."""
        finished = replace(part, checksum=checksum(self.payload[: part.payload_bytes]))
        self._write_header(finished)
        return finished

    def finish_received(self, part: Part) -> bool:
        """Mark the file as finished if the payload has the checksum of the part; return whether it has."""
        is_intact = checksum(self.payload[: part.payload_bytes]) == part.checksum
        if is_intact:
            self._write_header(part)
        return is_intact

    def _write_header(self, part: Part) -> None:
        page = part.to_page()
        self._map[8 : len(page)] = page[8:]
        self._map[:8] = page[:8]
        self.part = part


def read_part(path: Path) -> Part | None:
    """Return the part in a file; None for an unfinished snapshot. Raises DamagedSnapshotError and OSError."""
    with path.open("rb") as file:
        part = Part.from_page(file.read(HEADER_BYTES), path.name)
        size = os.fstat(file.fileno()).st_size
    if part is not None and size < HEADER_BYTES + part.payload_bytes:
        raise DamagedSnapshotError(f"{path.name}: {size} bytes where {HEADER_BYTES + part.payload_bytes} belong")
    return part


def open_payload(path: Path, part: Part, *, verifies: bool = True) -> torch.Tensor:
    """Return the payload of a finished snapshot, privately mapped.

    verifies: compare the checksum; False where another process does. Raises DamagedSnapshotError and OSError.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), HEADER_BYTES + part.payload_bytes, access=mmap.ACCESS_COPY)
    payload = torch.frombuffer(mapped, dtype=torch.uint8, offset=HEADER_BYTES)
    if verifies and checksum(payload) != part.checksum:
        raise DamagedSnapshotError(f"{path.name}: the contents do not have the checksum that was recorded")
    return payload
