"""The shared state of the processes of an attempt: their group, the stores of their nodes, the files of their parts."""

from __future__ import annotations

import logging
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import trainium_worker
from trainium_worker.snapshots.copies import choose_buddies
from trainium_worker.snapshots.files import SUFFIX
from trainium_worker.snapshots.store import PartFiles, SnapshotStore, run_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from trainium_worker.dcp.parts import StrPath
    from trainium_worker.snapshots.files import SnapshotFile, Version

_log = logging.getLogger(__name__)

ENV_MEMORY_DIRECTORY = "TRAINIUM_MEMORY_DIR"
ENV_RUN_ID = "TRAINIUM_RUN_ID"
DEFAULT_MEMORY_DIRECTORY = "/dev/shm/trainium"  # noqa: S108 - the volume of a worker

FILES_PER_PART = 2
"""The newest complete snapshot, and the one being written."""
TAG = 1 << 17
"""The tag of the messages between ranks; other tags belong to the program."""


class Session:
    """The processes of one attempt: their group, the stores of their nodes, and their buddies."""

    def __init__(self, directory: Path | None) -> None:
        """Connect all ranks. Collective. Saves are kept only if every rank has a directory."""
        distributed = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self.group: ProcessGroup | None = dist.new_group(backend="gloo") if distributed else None
        self.directory = directory
        self.snapshots = None if directory is None else _open_store(directory)
        self.stores: list[str] = self.all_gather("" if self.snapshots is None else self.snapshots.read_id())
        """The id of the store of each rank's node; empty for none."""
        self.store = self.stores[self.rank]
        attempt = int(os.environ.get(trainium_worker.ENV_ATTEMPT, "0"))
        self.id: str = self.all_gather(f"{attempt:08}-{secrets.token_hex(8)}")[0]
        """The id of the session; ordered by attempts."""
        self.is_enabled = all(self.stores)
        """Whether saves are kept."""
        buddies = choose_buddies([(store, str(rank)) for rank, store in enumerate(self.stores)])
        self.copy_target = buddies.get(self.rank)
        """The rank that keeps copies of this rank's part, if any."""
        self.copy_sources = [source for source, target in buddies.items() if target == self.rank]
        self.store_ranks = [rank for rank, store in enumerate(self.stores) if store == self.store]
        """The ranks that share this rank's store, including itself."""
        self.resumed: Version | None = None
        """The save from which this attempt resumed, kept until the attempt has completed one."""
        self.complete_saves = 0
        """The number of complete saves of this attempt."""
        self.newest_files: dict[int, SnapshotFile] = {}
        """The files of the newest save of this attempt, by the rank of the part."""
        self.receivers = ThreadPoolExecutor(max(1, len(self.copy_sources)), thread_name_prefix="memory-copy")
        """The threads that receive copies, one for each rank."""
        self.pending_writer: object | None = None
        """The writer whose copy of the state is in the stager's memory."""
        self._stager: DefaultStager | None = None
        self.resumed_payloads: dict[int, torch.Tensor] = {}
        """The parts of the resumed save in this node's store, by rank; mapped until this attempt has a save."""
        self._files: dict[int, PartFiles] = {}
        if directory is not None:
            for rank in (self.rank, *self.copy_sources):
                generation = trainium_worker.generation
                self._files[rank] = PartFiles(directory, str(rank), generation=generation, count=FILES_PER_PART)

    def copy_state(self, state: dict[str, Any], writer: object) -> Any:
        """Copy the state for a writer, reusing the memory of the last copy unless a save still needs it."""
        if self._stager is None or self.pending_writer is not None:
            options = StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
            self._stager = DefaultStager(options)
        self.pending_writer = writer
        return self._stager.stage(state)

    def free_copy(self) -> None:
        """Free the memory of the copies that `copy_state` made, once no save needs them."""
        self._stager = None

    def reserve(self, sizes: Sequence[int] | Mapping[int, int]) -> dict[int, SnapshotFile]:
        """Return the files for the next save, by rank. Raises OSError if there is no space."""
        return {rank: files.next(sizes[rank]) for rank, files in self._files.items()}

    def disable(self, files: Iterable[SnapshotFile]) -> None:
        """Stop keeping saves, and discard the one whose parts are in these files."""
        self.is_enabled = False
        for file in files:
            file.invalidate()
        for part_files in self._files.values():
            part_files.remove_unfinished()

    def remove_leftovers(self) -> None:
        """Remove the saves of earlier attempts in this node's store, on one rank of the node.

        Before the first save of this attempt all but the resumed one are removed; before the second, that one too.
        """
        if self.complete_saves:
            self.resumed_payloads.clear()
        store = self.snapshots
        if store is None or self.complete_saves > 1 or self.store_ranks[0] != self.rank:
            return
        parts = store.parts()
        for path in store.directory.glob(f"*{SUFFIX}"):
            version = parts[path].version if path in parts else None
            if version is None:
                is_stale = not self.complete_saves
            else:
                is_stale = version.session != self.id and (self.complete_saves > 0 or version != self.resumed)
            if is_stale:
                path.unlink(missing_ok=True)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_gather_integers(self, value: int) -> list[int]:
        """Return the values of all ranks, faster than `all_gather`. Collective."""
        return [int(rank_value) for rank_value in self.all_gather_tensors(torch.tensor(value))]

    def all_gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have one shape and are on the processor. Collective."""
        if self.group is None:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(tensors, tensor, group=self.group)
        return tensors


def _open_store(directory: Path) -> SnapshotStore | None:
    """Return the store in a directory; None if it cannot be created, which a notice explains."""
    try:
        store = SnapshotStore(directory, lambda _, error: _log.warning("a snapshot in memory is not used: %s", error))
        store.read_id()
    except OSError as error:
        trainium_worker.notice(
            f"no snapshots are kept in memory, only checkpoints on storage count: {directory} of rank "
            f"{trainium_worker.rank}: {error.strerror}"
        )
        return None
    return store


_sessions: dict[tuple[object, ...], Session] = {}


def open_session(directory: StrPath | None) -> Session:
    """Return the session of this process; the first call of each rank is collective."""
    volume = _find_memory_volume() if directory is None else Path(directory)
    run = os.environ.get(ENV_RUN_ID) or os.environ.get("TORCHELASTIC_RUN_ID") or "local"
    folder = None if volume is None else run_directory(volume, run)
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    key = (os.getpid(), folder, group)
    if key not in _sessions:
        _sessions[key] = Session(folder)
    return _sessions[key]


def _find_memory_volume() -> Path | None:
    """Return the memory volume of this pod, which outlives its processes; None without an agent."""
    if trainium_worker.ENV_PROGRESS_FILE not in os.environ:
        return None
    return Path(os.environ.get(ENV_MEMORY_DIRECTORY) or DEFAULT_MEMORY_DIRECTORY)
