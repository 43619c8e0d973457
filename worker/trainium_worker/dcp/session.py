"""The shared state of the processes of an attempt: their group, the stores of their nodes, the files of their parts."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import trainium_worker
from trainium_worker import snapshot
from trainium_worker.dcp.parts import SUFFIX, find_buddies, read_parts
from trainium_worker.snapshot import SnapshotFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import ProcessGroup

    from trainium_worker.dcp.parts import SaveKey, StrPath

ENV_MEMORY_DIRECTORY = "TRAINIUM_MEMORY_DIR"
ENV_RUN_ID = "TRAINIUM_RUN_ID"
DEFAULT_MEMORY_DIRECTORY = "/dev/shm/trainium"  # noqa: S108 - the volume of a worker

FILES = 2
"""The number of snapshots of each part: the newest complete one, and the one being written."""
TAG = 1 << 17
"""The tag of the messages between ranks; other tags belong to the program."""


class Slots:
    """The files of one part in one directory, written by one process."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._files: list[SnapshotFile] = []

    def next(self, payload_bytes: int) -> SnapshotFile:
        """Return an unfinished file, else the older one, with space for a payload. Raises OSError."""
        slot = next((candidate for candidate in self._files if not candidate.finished), None)
        if slot is None and len(self._files) == FILES:
            slot = self._files[0]
        if slot is not None:
            self._files.remove(slot)
        if slot is not None and not payload_bytes <= slot.payload_bytes <= 2 * payload_bytes:
            slot.path.unlink(missing_ok=True)
            slot = None
        if slot is None:
            path = self._directory / f"{self._name}-{secrets.token_hex(4)}{SUFFIX}"
            snapshot.reserve(path, payload_bytes)
            slot = SnapshotFile(path, payload_bytes)
        else:
            slot.invalidate(slot.path)
        self._files.append(slot)
        return slot

    def remove_unfinished(self) -> None:
        """Remove the files without a finished snapshot."""
        for slot in self._files:
            if not slot.finished:
                slot.path.unlink(missing_ok=True)
        self._files = [slot for slot in self._files if slot.finished]


class Session:
    """The processes of one attempt: their group, the stores of their nodes, and their buddies."""

    def __init__(self, directory: Path | None) -> None:
        """Connect all ranks. Collective. Saves are kept only if every rank has a directory."""
        distributed = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self.group: ProcessGroup | None = dist.new_group(backend="gloo") if distributed else None
        self.directory = directory
        places = self.gather((_store_of(directory), secrets.token_hex(8)))
        self.stores = [place[0] for place in places]
        self.id: str = places[0][1]
        self.keeps = all(self.stores)
        """Whether saves are kept."""
        self.target, self.sources = find_buddies(self.stores, self.rank)
        self.neighbours = [rank for rank, each in enumerate(self.stores) if each == self.stores[self.rank]]
        """The ranks that share this rank's store, including itself."""
        self.resumed: SaveKey | None = None
        """The save from which this attempt resumed, kept until the attempt has completed one."""
        self.saves = 0
        """The number of complete saves of this attempt."""
        self.staged: object | None = None
        """The writer whose copy of the state is in the stager's memory."""
        self._stager = _new_stager()
        self.resumed_payloads: dict[int, torch.Tensor] = {}
        """The parts of the resumed save in this node's store, by rank; mapped until this attempt has a save."""
        self._slots = (
            {} if directory is None else {rank: Slots(directory, f"r{rank}") for rank in (self.rank, *self.sources)}
        )

    def stage(self, state: dict[str, Any], writer: object) -> Any:
        """Copy the state, reusing the memory of the last copy unless a save still needs it."""
        if self.staged is not None:
            self._stager = _new_stager()
        self.staged = writer
        return self._stager.stage(state)

    def reserve(self, sizes: Sequence[int]) -> dict[int, SnapshotFile]:
        """Return the files for the next save, by rank. Raises OSError if there is no space."""
        return {rank: slots.next(sizes[rank]) for rank, slots in self._slots.items()}

    def switch_off(self, files: Iterable[SnapshotFile]) -> None:
        """Stop keeping saves, and drop the one whose parts are in these files."""
        self.keeps = False
        for slot in files:
            slot.invalidate(slot.path)
        for slots in self._slots.values():
            slots.remove_unfinished()

    def remove_leftovers(self) -> None:
        """Remove the saves of earlier attempts in this node's store, on one rank of the node.

        Before the first save of this attempt all but the resumed one are removed; before the second, that one too.
        """
        if self.saves:
            self.resumed_payloads.clear()
        if self.directory is None or self.saves > 1 or self.neighbours[0] != self.rank:
            return
        parts = read_parts(self.directory)
        for path in self.directory.glob(f"*{SUFFIX}"):
            part = parts.get(path)
            if part is None:
                stale = not self.saves
            else:
                stale = part.session != self.id and (self.saves > 0 or part.save != self.resumed)
            if stale:
                path.unlink(missing_ok=True)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_sizes(self, size: int) -> list[int]:
        """Return the sizes of all ranks. Collective."""
        if self.group is None:
            return [size]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([size]), group=self.group)
        return [int(rank_size) for rank_size in sizes]

    def worst(self, state: int) -> int:
        """Return the highest state of all ranks. Collective."""
        return max(self.gather_sizes(state))


def _store_of(directory: Path | None) -> str:
    """Return the id of a directory, created if needed; empty if there is none, which a notice explains."""
    if directory is None:
        return ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return snapshot.store_id(directory)
    except OSError as error:
        trainium_worker.notice(
            f"no snapshots are kept in memory, only checkpoints on storage count: {directory} of rank "
            f"{trainium_worker.rank}: {error.strerror}"
        )
        return ""


def _new_stager() -> DefaultStager:
    return DefaultStager(StagingOptions(False, False, False, False))


_sessions: dict[tuple[object, ...], Session] = {}


def session_of(directory: StrPath | None) -> Session:
    """Return the session of this process; the first call of each rank is collective."""
    volume = _memory_volume() if directory is None else Path(directory)
    run = os.environ.get(ENV_RUN_ID) or os.environ.get("TORCHELASTIC_RUN_ID") or "local"
    folder = None if volume is None else snapshot.directory_of_run(volume, run)
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    key = (os.getpid(), folder, world)
    if key not in _sessions:
        _sessions[key] = Session(folder)
    return _sessions[key]


def _memory_volume() -> Path | None:
    """Return the memory volume of this pod, which outlives its processes; None without an agent."""
    if trainium_worker.ENV_PROGRESS_FILE not in os.environ:
        return None
    return Path(os.environ.get(ENV_MEMORY_DIRECTORY) or DEFAULT_MEMORY_DIRECTORY)
