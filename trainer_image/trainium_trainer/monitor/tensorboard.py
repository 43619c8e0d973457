"""A writer of TensorBoard scalars in its file format, without TensorBoard.

Own code because importing the library takes longer than a whole restart may take; the format is a sequence of
length-prefixed, checksummed protocol-buffer messages, of which scalars need six fields.
Invariant: a reader sees the final history: the first record after a resume tells it to drop what came later before.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


class ScalarWriter:
    """One event file in a folder."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        """Create the file. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._record(_event(now) + _bytes_field(3, b"brain.Event:2"))
        # SessionLog START (field 7, status 1) at the first step to come: later events of older files are dropped, also
        # where a run that was killed before its first checkpoint begins again.
        self._record(_event(now, resume_step + 1) + _bytes_field(7, b"\x08\x01"))
        self._file.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the values of one step."""
        values = b"".join(
            _bytes_field(1, _bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in scalars.items()
        )
        self._record(_event(time.time(), step) + _bytes_field(5, values))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _record(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(
            length + struct.pack("<I", _masked_crc(length)) + event + struct.pack("<I", _masked_crc(event))
        )


def _event(wall_time: float, step: int = 0) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step)
