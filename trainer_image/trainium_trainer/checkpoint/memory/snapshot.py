"""One snapshot file of the memory tier: a header page, then the payload, mapped into the process.

Guarantees:
- A file counts only while its header is whole and names a checksum that the payload has.
- The header is wiped before the payload changes and written again after it was summed, magic last, so a process killed
  at any instant leaves either a valid snapshot or one that is marked as unfinished.
- The space is reserved when the file is made, so that a full memory volume is an error there and never a bus error in
  the middle of a step.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_trainer.checkpoint.format.flat_buffer import checksum
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.memory.claims import Claim, Moment, ShardKey

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"TRNSNAP1"
HEADER_BYTES = 4096
_TEXT_START = 16


class DamagedSnapshotError(Exception):
    """A finished snapshot whose bytes are not what was written."""


@dataclass(frozen=True, slots=True)
class Header:
    """The identity of a snapshot and the size of its payload."""

    claim: Claim
    config_digest: str
    payload_bytes: int

    def to_bytes(self) -> bytes:
        """Return the header page without its magic."""
        moment, key = self.claim.moment, self.claim.key
        text = json.dumps(
            {
                "step": moment.position.step,
                "samples": moment.position.samples,
                "tokens": moment.position.tokens,
                "loss": moment.position.loss,
                "gradNorm": moment.position.grad_norm,
                "batch": moment.position.batch,
                "generation": moment.generation,
                "session": moment.session,
                "key": [key.tp_rank, key.tp_size, key.dp_rank, key.dp_size, key.pp_rank, key.pp_size],
                "layout": self.claim.layout,
                "checksum": self.claim.checksum,
                "config": self.config_digest,
                "payloadBytes": self.payload_bytes,
            }
        ).encode()
        return len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text

    @staticmethod
    def from_text(text: bytes) -> Header:
        """Return the reverse; KeyError, TypeError or ValueError for a text of another format."""
        raw: dict[str, Any] = json.loads(text)
        position = Position(
            step=raw["step"],
            samples=raw["samples"],
            tokens=raw["tokens"],
            loss=raw["loss"],
            grad_norm=raw["gradNorm"],
            batch=raw.get("batch"),
        )
        moment = Moment(position, raw["generation"], raw["session"])
        claim = Claim(moment, ShardKey(*raw["key"]), raw["layout"], raw["checksum"])
        return Header(claim, raw["config"], raw["payloadBytes"])


def read_header(path: Path) -> Header | None:
    """Return the header of a finished snapshot, None for an unfinished one.

    DamagedSnapshotError when it is altered or cut.
    """
    with path.open("rb") as file:
        page = file.read(HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    header = parse_header(page, path.name)
    if header is not None and size != HEADER_BYTES + header.payload_bytes:
        raise DamagedSnapshotError(f"{path.name}: {size} bytes where {HEADER_BYTES + header.payload_bytes} belong")
    return header


def parse_header(page: bytes, name: str) -> Header | None:
    """Return the header in a page; None for an unfinished one. DamagedSnapshotError when it is altered."""
    if page[:8] != _MAGIC:
        return None
    length = int.from_bytes(page[8:12], "little")
    text = page[_TEXT_START : _TEXT_START + length]
    if zlib.crc32(text) != int.from_bytes(page[12:16], "little"):
        raise DamagedSnapshotError(f"{name}: the header is altered")
    try:
        return Header.from_text(text)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedSnapshotError(f"{name}: the header is of another format") from error


class SnapshotFile:
    """A snapshot file open for writing, its payload mapped as a tensor of bytes."""

    def __init__(self, path: Path, payload_bytes: int, header: Header | None) -> None:
        self.path = path
        self.header = header
        self._payload_bytes = payload_bytes
        descriptor = os.open(path, os.O_RDWR)
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(descriptor, HEADER_BYTES + payload_bytes, flags)
        finally:
            os.close(descriptor)
        self.payload = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)

    @staticmethod
    def create(path: Path, payload_bytes: int) -> SnapshotFile:
        """Return a new, unfinished snapshot with all of its space reserved; OSError when there is no room."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + payload_bytes)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return SnapshotFile(path, payload_bytes, None)

    def page(self) -> bytes:
        """Return the header page as it is."""
        return self._map[:HEADER_BYTES]

    def invalidate(self, path: Path) -> None:
        """Declare the file unfinished and give it the name of its next owner."""
        self._map[:8] = bytes(8)
        self.header = None
        if path != self.path:
            self.path.rename(path)
            self.path = path

    def finalize(self, moment: Moment, key: ShardKey, layout: str, config_digest: str) -> Claim:
        """Sum the payload and declare the file finished."""
        claim = Claim(moment, key, layout, checksum(self.payload))
        header = Header(claim, config_digest, self._payload_bytes)
        page = header.to_bytes()
        self._map[8 : 8 + len(page)] = page
        self._map[:8] = _MAGIC
        self.header = header
        return claim


def open_verified(path: Path, header: Header) -> torch.Tensor:
    """Return the payload of a finished snapshot, privately mapped; DamagedSnapshotError for another checksum."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), HEADER_BYTES + header.payload_bytes, access=mmap.ACCESS_COPY)
    payload = torch.frombuffer(mapped, dtype=torch.uint8, offset=HEADER_BYTES)
    if checksum(payload) != header.claim.checksum:
        raise DamagedSnapshotError(f"{path.name}: the contents do not have the checksum that was recorded")
    return payload
