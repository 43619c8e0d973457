"""The memory tier: the newest snapshots of this rank's shard in a store that outlives the process.

The training thread copies the state into a mapped, preallocated file, which is the only cost in the step; on CUDA the
copy overlaps with the next step. A thread then computes the checksum and writes the header. Where no other node holds
the shard, another thread sends it to a buddy. Three files per shard rotate, so that the newest two finished ones always
exist; the node of a buddy has two more. Files and copies are those of `trainium_worker.snapshots`.

Guarantees:
- The newest two finished snapshots are never overwritten.
- A writer whose generation is below the folder's GENERATION stops; file names carry the generation.
- A step is complete on any rank only after every rank has finalized its snapshot of the step before, copies included
  (see `wait_for_snapshot`). So at most one step is lost, even if a node fails.
- Snapshots newer than the resumed step belong to an abandoned history and are removed at resume.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from trainium_contract.wire.checkpoint_manifest import GENERATION_FENCE_NAME
from trainium_contract.wire.messages import MAX_GENERATION
from trainium_trainer.checkpoint.errors import refuse_older_generation
from trainium_trainer.checkpoint.format.live_state import copy_all
from trainium_trainer.checkpoint.memory.layout import describe_mesh
from trainium_worker.snapshots.copies import TAGS_PER_PART, CopyReceiver, CopySender
from trainium_worker.snapshots.files import SUFFIX, DamagedSnapshotError, Part
from trainium_worker.snapshots.store import PartFiles, SnapshotStore, part_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.memory.layout import BufferLayout
    from trainium_worker.snapshots.files import SnapshotFile, Version

_OWN_FILES = 3
"""Two finished snapshots plus the one being written."""
_KEPT_FILES = 2
"""Copies of another node's shard: a finished one and the one being received."""
_COPY_TIMEOUT_SECONDS = 60.0
"""The time that a step waits for a copy; a copy takes less than a step unless the network has a problem."""
_FIRST_TAG = 1 << 16
"""Above the tags of the exchange at resume."""


class MemoryTier:
    """Snapshots of one rank's shard in one store; all methods are called from the training thread."""

    def __init__(self, directory: Path, *, name: str, layout: BufferLayout, generation: int) -> None:
        """`name`: the shard. Raises OSError if the directory cannot be created."""
        self.directory = directory
        self.name = name
        self.layout = layout
        self.generation = generation
        self.local_names = frozenset({name})
        """The shards that ranks of this node write or keep in this store; files of other shards are leftovers."""
        self.finalized_step: int | None = None
        self.warnings: list[str] = []
        self._store = SnapshotStore(directory, self._report_damage)
        self._own = PartFiles(directory, name, generation=generation, count=_OWN_FILES)
        self._copies: dict[str, tuple[PartFiles, int]] = {}
        """The files for shards of other nodes, and the size of a payload."""
        self._receivers: list[CopyReceiver] = []
        self._copying: CopySender | None = None
        self._late = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-snapshot")
        self._finalizing: Future[Part] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._warned: set[Path] = set()
        self._staged_in_session = 0
        self._fence_stamp: tuple[int, int] | None = None

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        new, self.warnings = self.warnings, []
        return new

    # ---- the store --------------------------------------------------------------------------------------------------

    def store_id(self) -> str:
        """Return an id of the store that is the same for all processes that share it."""
        return self._store.read_id()

    def claim_fence(self) -> None:
        """Raise the store's generation to this process's. Raises StaleGenerationError when it is already higher."""
        if self._read_fence() < self.generation:
            draft = self.directory / f".{GENERATION_FENCE_NAME}.{os.getpid()}"
            draft.write_text(f"{self.generation}\n")
            draft.replace(self.directory / GENERATION_FENCE_NAME)
        self._check_fence()

    def list_records(self) -> dict[Path, Part]:
        """Return the finished snapshots in the store that were written with the settings of this start."""
        own_settings, _, _ = self.layout.digest.partition("-")
        parts: dict[Path, Part] = {}
        for path, part in self._store.parts().items():
            if part.layout.partition("-")[0] == own_settings:
                parts[path] = part
            elif path not in self._warned:
                self._warned.add(path)
                self.warnings.append(f"memory snapshot {path.name} was written with other settings and is ignored")
        return parts

    def open_part(self, part: Part) -> torch.Tensor | None:
        """Return the verified payload of a snapshot; None, with a warning, when it is damaged or missing."""
        payloads = (self._store.open(path, part) for path, record in self.list_records().items() if record == part)
        return next((payload for payload in payloads if payload is not None), None)

    # ---- writing ----------------------------------------------------------------------------------------------------

    def open_files(self) -> bool:
        """Reserve the files of this shard; False, with a warning, when the memory volume has no room for them."""
        try:
            self._own.reserve(self.layout.payload_bytes, self.list_records(), self.layout.digest)
        except OSError as error:
            need = _OWN_FILES * self.layout.payload_bytes / 2**20
            self.warnings.append(
                f"memory snapshots are off on this worker: {self.directory}: {error.strerror}: {need:.0f} MiB are "
                "needed; raise the memory volume's size, or set checkpoint.memory.everySteps to 0"
            )
            return False
        return True

    def create_receiving_file(self) -> SnapshotFile:
        """Return a file to receive a peer's snapshot of this rank's own shard into."""
        return self._own.next(self.layout.payload_bytes)

    def stage(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the state at the end of a step; the thread finalizes the copy. Waits for the previous snapshot first."""
        self.wait_for_snapshot()
        self._check_fence()
        if self._staged_in_session == _OWN_FILES - 1:
            # Every rank has finalized the first snapshot of this session by now, so snapshots of other sessions for
            # shards that no rank of this store has any more are obsolete.
            for path in self._find_foreign_files():
                path.unlink(missing_ok=True)
        file = self._own.next(self.layout.payload_bytes)
        targets, sources = self.layout.view_tensors(file.payload), self.layout.sort_tensors(tensors)
        copied: torch.cuda.Event | None = None
        if sources[0].device.type == "cuda":
            file.pin()
            copied = self._copy_on_side_stream(targets, sources)
        else:
            copy_all(targets, sources)
        self._staged_in_session += 1
        part = Part(version, self.name, self.layout.digest, self.layout.payload_bytes)
        self._finalizing = self._thread.submit(self._finalize, file, part, copied)

    def wait_for_snapshot(self) -> None:
        """Wait until the last staged snapshot and its copy are finalized.

        It is called before the last collective of every step, so that the completion of a step on any rank implies that
        every rank has finalized the step before.
        """
        if self._finalizing is not None:
            part = self._finalizing.result()
            self._finalizing = None
            self.finalized_step = part.version.step
        if self._copying is not None:
            self._wait_for_copy(self._copying)

    def close(self) -> None:
        """Finish the snapshot in progress, close the connections to the buddies and end the threads."""
        self._thread.shutdown(wait=True)
        if self._copying is not None:
            self._copying.close()
            self._copying = None
        for receiver in self._receivers:
            receiver.close()
        self._receivers.clear()
        self._own.close()
        self._copies.clear()

    # ---- buddies ----------------------------------------------------------------------------------------------------

    def open_copy_files(self, name: str, layout: str, payload_bytes: int) -> bool:
        """Reserve the files for copies of another node's shard; False, with a warning, when there is no room."""
        files = PartFiles(self.directory, name, generation=self.generation, count=_KEPT_FILES)
        try:
            files.reserve(payload_bytes, self.list_records(), layout)
        except OSError as error:
            need = _KEPT_FILES * payload_bytes / 2**20
            self.warnings.append(
                f"this worker keeps no copies of another's snapshots: {self.directory}: {error.strerror}: {need:.0f} "
                "MiB are needed; raise the memory volume's size, or set checkpoint.memory.buddies to 0"
            )
            return False
        self._copies[name] = files, payload_bytes
        return True

    def receive_from(self, name: str, group: ProcessGroup, source: int, number: int) -> None:
        """Start to receive the snapshots of a shard for which files are open."""
        files, payload_bytes = self._copies[name]

        def choose_file(part: Part) -> SnapshotFile:
            if part.name != name:
                raise DamagedSnapshotError(f"rank {source} sent shard {part.name} where {name} belongs")
            self._check_fence()
            return files.next(payload_bytes)

        self._receivers.append(CopyReceiver(group, source, _FIRST_TAG + TAGS_PER_PART * number, choose_file))

    def send_to(self, group: ProcessGroup, target: int, number: int) -> None:
        """Start to send each finalized snapshot to a buddy."""
        self._copying = CopySender(group, target, _FIRST_TAG + TAGS_PER_PART * number)

    def _copy_on_side_stream(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> torch.cuda.Event:
        """Copy on a separate stream; the state does not change before `wait_for_snapshot`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(sources[0].device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(sources[0].device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
        copied: torch.cuda.Event = self._stream.record_event()
        return copied

    def _finalize(self, file: SnapshotFile, part: Part, copied: torch.cuda.Event | None) -> Part:
        if copied is not None:
            copied.synchronize()
        finished = file.finish(part)
        if self._copying is not None:
            self._copying.offer(file, finished)
        return finished

    def _wait_for_copy(self, copying: CopySender) -> None:
        if not copying.wait(0.0 if self._late else _COPY_TIMEOUT_SECONDS):
            if not self._late:
                self._late = True
                self.warnings.append(
                    f"the copy of this worker's snapshot has not arrived at its buddy after "
                    f"{_COPY_TIMEOUT_SECONDS:.0f} s: until it does, a lost node costs more than one step"
                )
            return
        self._late = False

    # ---- cleaning ---------------------------------------------------------------------------------------------------

    def discard_after(self, step: int, *, local: bool, others: bool) -> None:
        """Remove snapshots newer than the resumed step, which belong to an abandoned history.

        `local` (set on the writer of a shard) selects those of this shard. `others` (set on one rank) selects those of
        shards that no rank of this store has, and also incomplete ones and those of another layout of the state.
        """
        if local:
            self._own.invalidate(lambda part, _: part.version.step > step)
        if others:
            parts, mesh = self.list_records(), describe_mesh(self.name)
            for path in self._find_foreign_files():
                part = parts.get(path)
                if part is None or part.version.step > step or describe_mesh(part.name) != mesh:
                    path.unlink(missing_ok=True)

    def _find_foreign_files(self) -> list[Path]:
        return [path for path in self.directory.glob(f"*{SUFFIX}") if part_name(path) not in self.local_names]

    # ---- internals --------------------------------------------------------------------------------------------------

    def _report_damage(self, damaged: Path, error: Exception) -> None:
        self.warnings.append(f"memory snapshot is damaged and ignored: {error}")
        self._own.invalidate(lambda _, path: path == damaged)

    def _read_fence(self) -> int:
        try:
            newest = int((self.directory / GENERATION_FENCE_NAME).read_text())
        except (FileNotFoundError, ValueError):
            return -1
        return newest if newest <= MAX_GENERATION else -1

    def _check_fence(self) -> None:
        status = (self.directory / GENERATION_FENCE_NAME).stat()
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp == self._fence_stamp:
            return
        newest = self._read_fence()
        refuse_older_generation(str(self.directory), newest, self.generation)
        self._fence_stamp = stamp
