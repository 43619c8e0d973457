"""The history of a run whose checkpoints are in an object store: a copy of metrics.jsonl beside them.

Lines are appended to metrics.jsonl at every step, which an object store cannot do, so the file is on the first rank's
node. Invariants: the copy is replaced after each commit, so a run that is resumed elsewhere has the lines up to its
checkpoint; a copy that fails stops nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trainium_trainer.checkpoint.storage.protocol import read_small

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_trainer.checkpoint.storage.protocol import Storage

_NAME = "metrics.jsonl"


def send_records(storage: Storage, folder: Path) -> None:
    """Put the lines that are there beside the checkpoints."""
    with contextlib.suppress(OSError):
        data = (folder / _NAME).read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        storage.write_stream(_NAME, [memoryview(whole)], len(whole))


def fetch_records(storage: Storage, folder: Path) -> None:
    """Bring the copy to a node that has no such file."""
    path = folder / _NAME
    if path.exists():
        return
    with contextlib.suppress(OSError):
        data = read_small(storage, _NAME)
        if data is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
