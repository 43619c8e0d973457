"""A snapshot file in memory: a header page, then the payload, memory-mapped; and its copy to another node.

Guarantees:
- A file is valid only while its header is intact and has the payload's checksum.
- The header is cleared before the payload changes and written after the checksum is computed, magic last, so a process
  killed at any time leaves either a valid snapshot or one marked as unfinished.
- The space is reserved when the file is created, so that a full memory volume is an error there and never a bus error
  during a step.
- A copy is sent as a header page and the payload, and is acknowledged once its receiver has finalized it.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import zlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from pathlib import Path

    from torch.distributed import ProcessGroup

HEADER_BYTES = 4096
BLOCK_BYTES = 4096
"""The size of a payload is a multiple of it, so that no byte is outside a block of the checksum."""
_MAGIC = b"TRNSNAP1"
_HEADER_START = 16
_WORDS_PER_BLOCK = BLOCK_BYTES // 8
_STORE_ID_FILE = "STORE_ID"


class DamagedSnapshotError(Exception):
    """A finished snapshot whose bytes are not what was written."""


def run_directory(volume: Path, run: str) -> Path:
    """Return the directory of a run's snapshots, so that runs that share a volume do not affect each other."""
    return volume / f"run-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


def read_store_id(directory: Path) -> str:
    """Return the id of a directory, created by its first process, by which processes know that they share it."""
    path = directory / _STORE_ID_FILE
    if not path.exists():
        draft = directory / f".{_STORE_ID_FILE}.{os.getpid()}"
        draft.write_text(secrets.token_hex(16))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path.read_text()


def pair_stores(stores: Sequence[str]) -> dict[str, str]:
    """Return for each store the one that keeps its copies; empty if there is only one store.

    Stores are paired, so that the loss of two stores loses a shard only if they are partners (2 in N-1 cases for a
    ring, 1 for pairs: Gemini, SOSP 2023). Partners are far apart in the order, because neighbours fail together (one
    switch, one power supply). With an odd number, three stores form a ring.
    """
    if len(stores) < 2:
        return {}
    half = len(stores) // 2
    groups = [[stores[number], stores[number + half]] for number in range(half)]
    if len(stores) % 2:
        groups[-1].append(stores[-1])
    return {store: group[(number + 1) % len(group)] for group in groups for number, store in enumerate(group)}


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

    def __init__(self, path: Path, payload_bytes: int) -> None:
        self.path = path
        self.payload_bytes = payload_bytes
        descriptor = os.open(path, os.O_RDWR)
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(descriptor, HEADER_BYTES + payload_bytes, flags)
        finally:
            os.close(descriptor)
        self.payload = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)

    @property
    def is_finished(self) -> bool:
        """Whether the file has a valid header page."""
        return self._map[:8] == _MAGIC

    def header_page(self) -> bytes:
        """Return the header page."""
        return self._map[:HEADER_BYTES]

    def invalidate(self, path: Path) -> None:
        """Mark the file as unfinished and rename it for its next owner."""
        self._map[:8] = bytes(8)
        if path != self.path:
            self.path.rename(path)
            self.path = path

    def write_header(self, header: bytes) -> None:
        """Mark the file as finished; the header contains the checksum of the payload."""
        page = len(header).to_bytes(4, "little") + zlib.crc32(header).to_bytes(4, "little") + header
        self._map[8 : 8 + len(page)] = page
        self._map[:8] = _MAGIC


def reserve(path: Path, payload_bytes: int) -> None:
    """Create a file for an unfinished snapshot with all of its space reserved. Raises OSError if there is no space."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, HEADER_BYTES + payload_bytes)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def read_header(path: Path) -> bytes | None:
    """Return the header of a file; None for an unfinished snapshot. Raises DamagedSnapshotError."""
    with path.open("rb") as file:
        return parse_header_page(file.read(HEADER_BYTES), path.name)


def parse_header_page(page: bytes, name: str) -> bytes | None:
    """Return the header in a header page; None for an unfinished snapshot. Raises DamagedSnapshotError."""
    if page[:8] != _MAGIC:
        return None
    length = int.from_bytes(page[8:12], "little")
    header = page[_HEADER_START : _HEADER_START + length]
    if zlib.crc32(header) != int.from_bytes(page[12:16], "little"):
        raise DamagedSnapshotError(f"{name}: the header is altered")
    return header


def open_payload(path: Path, payload_bytes: int, expected: str | None) -> torch.Tensor:
    """Return the payload of a finished snapshot, privately mapped.

    expected: its checksum, unless another process verifies it; DamagedSnapshotError when the payload has another one.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), HEADER_BYTES + payload_bytes, access=mmap.ACCESS_COPY)
    payload = torch.frombuffer(mapped, dtype=torch.uint8, offset=HEADER_BYTES)
    if expected is not None and checksum(payload) != expected:
        raise DamagedSnapshotError(f"{path.name}: the contents do not have the checksum that was recorded")
    return payload


# ---- to another node ------------------------------------------------------------------------------------------------


def send_copy(group: ProcessGroup, target: int, tag: int, header_page: bytes, payload: torch.Tensor) -> bool:
    """Send a finished snapshot to a rank; return whether it was stored. Uses three tags. Raises RuntimeError."""
    answer = torch.zeros(1, dtype=torch.uint8)
    reply = dist.irecv(answer, target, group=group, tag=tag + 2)
    wait_for(dist.isend(torch.frombuffer(bytearray(header_page), dtype=torch.uint8), target, group=group, tag=tag))
    wait_for(dist.isend(payload, target, group=group, tag=tag + 1))
    wait_for(reply)
    return bool(answer[0])


def receive_copy(
    group: ProcessGroup,
    source: int,
    tag: int,
    allocate: Callable[[bytes], torch.Tensor],
    finalize: Callable[[], bool],
    timeout: timedelta | None = None,
) -> bool:
    """Receive a copy from `send_copy`.

    Return False if the sender sent an empty page, which means that no more copies follow.

    allocate: returns the memory for the payload, given the header; finalize: finalizes the copy and returns whether it
    is intact. timeout: the time limit of the page. Raises RuntimeError if the sender failed or sends a
    damaged page.
    """
    page = torch.empty(HEADER_BYTES, dtype=torch.uint8)
    wait_for(dist.irecv(page, source, group=group, tag=tag), timeout)
    try:
        header = parse_header_page(page.numpy().tobytes(), f"from rank {source}")
    except DamagedSnapshotError as error:
        raise RuntimeError(str(error)) from error
    if header is None:
        return False
    wait_for(dist.irecv(allocate(header), source, group=group, tag=tag + 1))
    answer = torch.tensor([finalize()], dtype=torch.uint8)
    wait_for(dist.isend(answer, source, group=group, tag=tag + 2))
    return True


def wait_for(work: dist.Work | None, limit: timedelta | None = None) -> None:
    """Wait for a transfer, at most for `limit`; None: the timeout of its group."""
    if work is not None:
        work.wait(*(() if limit is None else (limit,)))
