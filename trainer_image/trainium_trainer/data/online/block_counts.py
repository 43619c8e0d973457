"""What is known of the tokens in each block: a note beside the checkpoints, so that a resume need not count again.

Each data-parallel rank appends to a file of its own and everybody reads all of them. Invariants: the notes are only a
memory of a pure function: any of them may be lost, torn, doubled or from another size of the job; a record that is not
whole is not believed; nothing is written once they are closed, whichever thread closes them.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_log = logging.getLogger("trainium.data")
_RECORD = np.dtype([("source", "<u4"), ("block", "<u4"), ("count", "<u4"), ("check", "<u4")])
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class BlockCounts:
    """The notes of one run's data."""

    def __init__(self, folder: Path | None, identity: str, rank: int | None) -> None:
        """`rank` is None for a process that only reads; without a folder nothing is remembered."""
        self._folder = folder
        self._prefix = f"blocks-{identity[:16]}-"
        self._lock = threading.Lock()
        """A run closes them while the thread that prepares batches writes, and a number is soon another file's."""
        self._descriptor: int | None = None
        if folder is not None and rank is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{self._prefix}{rank}.idx"
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.ftruncate(
                    self._descriptor, os.fstat(self._descriptor).st_size // _RECORD.itemsize * _RECORD.itemsize
                )
            except OSError as error:
                _log.warning("%s: block counts are not remembered (%s)", folder, error.strerror)

    def known(self, sources: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Blocks and their counts, for each source."""
        parts = [_read(path) for path in self._folder.glob(f"{self._prefix}*.idx")] if self._folder else []
        records = np.concatenate(parts) if parts else np.empty(0, _RECORD)
        return [
            (records["block"][chosen], records["count"][chosen])
            for chosen in (records["source"] == source for source in range(sources))
        ]

    def add(self, counts: Sequence[tuple[int, int, int]]) -> None:
        """Remember source, block and count; a store that does not take them is not asked twice."""
        if not counts:
            return
        records = np.zeros(len(counts), _RECORD)
        for name, column in zip(("source", "block", "count"), zip(*counts, strict=True), strict=True):
            records[name] = column
        records["check"] = _check(records)
        with self._lock:
            if self._descriptor is None:
                return
            try:
                os.write(self._descriptor, records.tobytes())
            except OSError as error:
                _log.warning("block counts are not remembered any more (%s)", error.strerror)
                self._close()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read(path: Path) -> NDArray[Any]:
    try:
        data = path.read_bytes()
    except OSError:
        return np.empty(0, _RECORD)
    records = np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    whole: NDArray[Any] = records[records["check"] == _check(records)]
    return whole


def _check(records: NDArray[Any]) -> NDArray[np.uint32]:
    mixed = np.zeros(len(records), np.uint64)
    for name, factor in zip(("source", "block", "count"), _FACTORS, strict=True):
        mixed += (records[name].astype(np.uint64) + 1) * np.uint64(factor)
    return (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
