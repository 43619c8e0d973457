"""The snapshots of a run in the memory of a node: a directory that outlives the processes, shared by its ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from typing import TYPE_CHECKING

from trainium_worker.snapshots.files import SUFFIX, DamagedSnapshotError, SnapshotFile, open_payload, read_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from trainium_worker.snapshots.files import Part

_ID_FILE = "STORE_ID"


def run_directory(volume: Path, run: str) -> Path:
    """Return the directory of a run's snapshots, so that runs that share a volume do not affect each other."""
    return volume / f"run-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


class SnapshotStore:
    """The finished snapshots in a directory; damaged ones are reported once and not listed."""

    def __init__(self, directory: Path, on_damage: Callable[[Path, Exception], None]) -> None:
        """Create the directory if needed. Raises OSError."""
        self.directory = directory
        self._on_damage = on_damage
        self._damaged: set[Path] = set()
        directory.mkdir(parents=True, exist_ok=True)

    def read_id(self) -> str:
        """Return the id of the store, created by its first process, by which processes know that they share it."""
        path = self.directory / _ID_FILE
        if not path.exists():
            draft = self.directory / f".{_ID_FILE}.{os.getpid()}"
            draft.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        return path.read_text()

    def parts(self) -> dict[Path, Part]:
        """Return the finished snapshots with intact headers."""
        parts: dict[Path, Part] = {}
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            if path in self._damaged:
                continue
            try:
                part = read_part(path)
            except FileNotFoundError:  # another rank of this node has removed it
                continue
            except (DamagedSnapshotError, OSError) as error:
                self._report(path, error)
                continue
            if part is not None:
                parts[path] = part
        return parts

    def open(self, path: Path, part: Part, *, verifies: bool = True) -> torch.Tensor | None:
        """Return the payload of a snapshot; None if it is damaged or was removed. `verifies`: as of `open_payload`."""
        try:
            return open_payload(path, part, verifies=verifies)
        except (DamagedSnapshotError, OSError, ValueError) as error:  # ValueError: it has become shorter
            self._report(path, error)
            return None

    def _report(self, path: Path, error: Exception) -> None:
        # The file stays until its owner reuses or removes it, because other ranks of the node may be reading it.
        self._damaged.add(path)
        self._on_damage(path, error)


class PartFiles:
    """The files of one part in one directory, written by one process; the oldest is written next."""

    def __init__(self, directory: Path, name: str, *, generation: int, count: int) -> None:
        """`count`: the number of files, which is one more than those that must stay intact."""
        self.name = name
        self.count = count
        self._directory = directory
        self._prefix = f"g{generation}-{name}"
        self._files: list[SnapshotFile] = []

    def reserve(self, payload_bytes: int, left: Mapping[Path, Part], layout: str) -> None:
        """Create the files, reusing those that earlier processes left for the part. Raises OSError without space.

        left: the finished snapshots in the directory; those of the part with another layout or size are removed.
        """
        if self._files:
            return
        expected = (self.name, layout, payload_bytes)
        usable = [
            (part.version, path)
            for path, part in left.items()
            if (part.name, part.layout, part.payload_bytes) == expected
        ]
        kept = [path for _, path in sorted(usable)[-self.count :]]
        for path in self._directory.glob(f"g*-{self.name}-*{SUFFIX}"):
            if path not in kept:
                path.unlink(missing_ok=True)
        created: list[SnapshotFile] = []
        try:
            while len(kept) + len(created) < self.count:
                created.append(SnapshotFile.create(self._new_path(), payload_bytes))
        except OSError:
            for file in created:
                file.path.unlink(missing_ok=True)
            raise
        self._files = [*(SnapshotFile(path, left[path]) for path in kept), *created]

    def next(self, payload_bytes: int) -> SnapshotFile:
        """Return a file for the next part, marked as unfinished. Raises OSError without space.

        It is an unfinished one, else a new one as long as there are fewer than `count`, else the oldest one.
        """
        file = next((candidate for candidate in self._files if candidate.part is None), None)
        if file is None and len(self._files) == self.count:
            file = self._files[0]
        if file is not None:
            self._files.remove(file)
            file.invalidate(self._new_path())
            if not payload_bytes <= file.capacity <= 2 * payload_bytes:
                file.path.unlink(missing_ok=True)
                file = None
        if file is None:
            file = SnapshotFile.create(self._new_path(), payload_bytes)
        self._files.append(file)
        return file

    def invalidate(self, is_invalid: Callable[[Part, Path], bool]) -> None:
        """Mark files as unfinished; the next parts overwrite them first."""
        for file in self._files:
            if file.part is not None and is_invalid(file.part, file.path):
                file.invalidate()

    def remove_unfinished(self) -> None:
        """Remove the files without a finished snapshot."""
        for file in self._files:
            if file.part is None:
                file.path.unlink(missing_ok=True)
        self._files = [file for file in self._files if file.part is not None]

    def close(self) -> None:
        """Unmap the files."""
        self._files.clear()

    def _new_path(self) -> Path:
        return self._directory / f"{self._prefix}-{secrets.token_hex(4)}{SUFFIX}"


def part_name(path: Path) -> str:
    """Return the part of a file name `g<generation>-<part>-<random>.snapshot`."""
    return path.name.partition("-")[2].rpartition("-")[0]
