"""Copies of metrics.jsonl, which is on rank 0's node, in an object store.

A line is appended to metrics.jsonl at every step, which an object store cannot do.

Guarantees:
- The copies are replaced after each commit, so that a run that resumes elsewhere has the lines up to its checkpoint.
- A copy that fails stops nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.trainer.addresses import is_address
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.protocol import Storage, read_small

if TYPE_CHECKING:
    from trainium_contract.trainer.checkpoint import CheckpointConfig

_NAME = "metrics.jsonl"


def find_records_folder(config: CheckpointConfig) -> Path:
    """Return the folder on this node for the run's records."""
    if not is_address(config.records):
        return Path(config.records)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home() may raise
    return Path(base) / "trainium" / f"records-{hashlib.sha256(config.records.encode()).hexdigest()[:16]}"


class RecordCopies:
    """The copies of the run's metrics in the store."""

    def __init__(self, config: CheckpointConfig, checkpoints: Storage) -> None:
        self._folder = find_records_folder(config)
        self._targets = [] if config.records == config.path and not is_address(config.path) else [checkpoints]
        if is_address(config.records) and config.records != config.path:
            self._targets.insert(0, open_storage(config.records))

    def send(self) -> None:
        """Copy the complete lines to the store."""
        for storage in self._targets:
            with contextlib.suppress(OSError):
                data = (self._folder / _NAME).read_bytes()
                complete_lines = data[: data.rfind(b"\n") + 1]
                storage.write_stream(_NAME, [memoryview(complete_lines)], len(complete_lines))

    def fetch(self) -> None:
        """Copy the lines from the store to a node without the file."""
        path = self._folder / _NAME
        for storage in self._targets:
            with contextlib.suppress(OSError):
                if not path.exists() and (data := read_small(storage, _NAME)) is not None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
