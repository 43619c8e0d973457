"""The files of one shard's snapshots in a memory folder: a few that rotate.

Guarantees:
- Names are `g<generation>-<shard>-<random>.snapshot`.
- The oldest file is used next, unfinished ones first.
- Files that earlier processes left for the shard are taken over when they fit and removed when they do not.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from trainium_trainer.checkpoint.memory.snapshot import Header, SnapshotFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainium_trainer.checkpoint.memory.claims import Claim, ShardKey

SUFFIX = ".snapshot"


class Slots:
    """The files of one shard in one folder, written by one process."""

    def __init__(self, directory: Path, key: ShardKey, *, generation: int, count: int) -> None:
        self.key = key
        self._directory = directory
        self._generation = generation
        self._count = count
        self._files: list[SnapshotFile] = []

    @property
    def is_open(self) -> bool:
        """Whether all files are there."""
        return len(self._files) == self._count

    def open(self, *, layout: str, payload_bytes: int, headers: Mapping[Path, Header]) -> None:
        """Reserve the files; `headers` are those of the finished ones in the folder. OSError when there is no room."""
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
        """Return the oldest file, declared unfinished, under a name of this process."""
        slot = min(self._files, key=_age_order)
        slot.invalidate(self._directory / self._name())
        return slot

    def forget_after(self, step: int) -> None:
        """Drop the snapshots of later steps."""
        for slot in self._files:
            if slot.header is not None and slot.header.claim.moment.position.step > step:
                slot.invalidate(slot.path)

    def drop(self, path: Path) -> None:
        """Declare the file at `path` unfinished, if it is one of these."""
        for slot in self._files:
            if slot.path == path:
                slot.invalidate(path)

    def claims(self) -> list[Claim]:
        """Return the claims of the finished files."""
        return [slot.header.claim for slot in self._files if slot.header is not None]

    def close(self) -> None:
        """Unmap the files."""
        self._files.clear()

    def _name(self) -> str:
        return f"g{self._generation}-{self.key}-{secrets.token_hex(4)}{SUFFIX}"

    def _adopt(self, layout: str, payload_bytes: int, headers: Mapping[Path, Header]) -> None:
        self._files = [
            SnapshotFile(path, payload_bytes, header)
            for path, header in headers.items()
            if header.claim.key == self.key and header.claim.layout == layout and header.payload_bytes == payload_bytes
        ]
        for path in self._directory.glob(f"g*-{self.key}-*{SUFFIX}"):
            if all(slot.path != path for slot in self._files):
                path.unlink(missing_ok=True)
        self._files.sort(key=_age_order)
        for extra in self._files[: -self._count]:
            extra.path.unlink(missing_ok=True)
        self._files = self._files[-self._count :]


def key_text(path: Path) -> str:
    """Return the shard in a file name `g<generation>-<shard>-<random>.snapshot`."""
    return path.name.partition("-")[2].rpartition("-")[0]


def _age_order(slot: SnapshotFile) -> tuple[bool, int, int]:
    """Unfinished files first, then by age."""
    if slot.header is None:
        return (False, 0, 0)
    moment = slot.header.claim.moment
    return (True, moment.position.step, moment.generation)
