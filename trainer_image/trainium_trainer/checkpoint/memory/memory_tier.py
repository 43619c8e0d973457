"""The memory tier: the newest snapshots of this rank's shard in a folder that outlives the process.

The training thread copies the state into a mapped, preallocated file, which is the only cost in the step; on CUDA the
copy overlaps with the next step. A thread then computes the checksum and writes the header. Where no other node holds
the shard, another thread sends it to a buddy (`buddy.py`). Three files per shard rotate, so that the newest two
finished ones always exist; the node of a buddy has two more.

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
from trainium_trainer.checkpoint.memory.buddy import SnapshotCopier, SnapshotReceiver, SnapshotSender
from trainium_trainer.checkpoint.memory.snapshot import (
    SUFFIX,
    BufferLayout,
    Header,
    SnapshotFile,
    SnapshotSlots,
    key_text,
    read_header,
)
from trainium_worker.snapshot import DamagedSnapshotError, open_payload, read_store_id

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.memory.snapshot import ShardKey, SnapshotRecord, StateVersion

_OWN_FILES = 3
"""Two finished snapshots plus the one being written."""
_KEPT_FILES = 2
"""Copies of another node's shard: a finished one and the one being received."""
_COPY_TIMEOUT_SECONDS = 60.0
"""The time that a step waits for a copy; a copy takes less than a step unless the network has a problem."""


class MemoryTier:
    """Snapshots of one rank's shard in one folder; all methods are called from the training thread."""

    def __init__(
        self, directory: Path, *, key: ShardKey, layout: BufferLayout, generation: int, session: str, config_digest: str
    ) -> None:
        self.directory = directory
        self.key = key
        self.layout = layout
        self.generation = generation
        self.session = session
        """Agreed among the ranks at resume; set before the first snapshot is staged."""
        self.local_keys = frozenset({key})
        """The shards that ranks of this node write or keep in this folder; files of other shards are leftovers."""
        self.config_digest = config_digest
        self.finalized_step: int | None = None
        self.buddy_step: int | None = None
        """The newest step of which the buddy has a copy; None without a buddy."""
        self.warnings: list[str] = []
        self._own = SnapshotSlots(directory, key, generation=generation, count=_OWN_FILES)
        self._buddy_slots: dict[ShardKey, SnapshotSlots] = {}
        self._receivers: list[SnapshotReceiver] = []
        self._copying: SnapshotCopier | None = None
        self._late = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-snapshot")
        self._finalizing: Future[SnapshotRecord] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._rejected: set[Path] = set()
        self._staged_in_session = 0
        self._fence_stamp: tuple[int, int] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    # ---- the folder -------------------------------------------------------------------------------------------------

    def store_id(self) -> str:
        """Return an id of the folder that is the same for all processes that share it."""
        return read_store_id(self.directory)

    def claim_fence(self) -> None:
        """Raise the folder's generation to this process's. Raises StaleGenerationError when it is already higher."""
        if self._fence() < self.generation:
            draft = self.directory / f".{GENERATION_FENCE_NAME}.{os.getpid()}"
            draft.write_text(f"{self.generation}\n")
            draft.replace(self.directory / GENERATION_FENCE_NAME)
        self._check_fence()

    def records(self) -> frozenset[SnapshotRecord]:
        """Return the finished snapshots in the folder with valid headers that match the configuration."""
        return frozenset(header.record for header in self._headers().values())

    def open_record(self, record: SnapshotRecord) -> torch.Tensor | None:
        """Return the verified payload of a recorded snapshot; None, with a warning, when it is damaged or missing."""
        for path, header in self._headers().items():
            if header.record != record:
                continue
            try:
                return open_payload(path, header.payload_bytes, header.record.checksum)
            except (DamagedSnapshotError, OSError) as error:
                self._reject(path, error)
        return None

    # ---- writing ----------------------------------------------------------------------------------------------------

    def open_slots(self) -> bool:
        """Reserve the files of this shard; False, with a warning, when the memory volume has no room for them."""
        try:
            size = self.layout.payload_bytes
            self._own.open(layout=self.layout.digest, payload_bytes=size, headers=self._headers())
        except OSError as error:
            need = _OWN_FILES * self.layout.payload_bytes / 2**20
            self.warnings.append(
                f"memory snapshots are off on this worker: {self.directory}: {error.strerror}: {need:.0f} MiB are "
                "needed; raise the memory volume's size, or set checkpoint.memory.everySteps to 0"
            )
            return False
        return True

    def receiving_slot(self) -> SnapshotFile:
        """Return a file to receive a peer's snapshot of this rank's own shard into."""
        return self._own.next()

    def finalize_received(self, slot: SnapshotFile, record: SnapshotRecord) -> bool:
        """Finalize a received snapshot; return False when it differs from what was sent."""
        finalized = slot.finalize(record.version, record.key, record.layout, self.config_digest)
        if finalized != record:
            slot.invalidate(slot.path)
            return False
        return True

    def stage(self, version: StateVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the state at the end of a step; the thread finalizes the copy. Waits for the previous snapshot first."""
        self.wait_for_snapshot()
        self._check_fence()
        if self._staged_in_session == _OWN_FILES - 1:
            # Every rank has finalized the first snapshot of this session by now, so snapshots of other sessions for
            # shards that no rank of this folder has any more are obsolete.
            for path in self._foreign_files():
                path.unlink(missing_ok=True)
        slot = self._own.next()
        targets, sources = self.layout.views(slot.payload), self.layout.ordered(tensors)
        copied: torch.cuda.Event | None = None
        if sources[0].device.type == "cuda":
            slot.pin()
            copied = self._copy_on_side_stream(targets, sources)
        else:
            copy_all(targets, sources)
        self._staged_in_session += 1
        self._finalizing = self._thread.submit(self._finalize, slot, version, copied)

    def wait_for_snapshot(self) -> None:
        """Wait until the last staged snapshot and its copy are finalized.

        It is called before the last collective of every step, so that the completion of a step on any rank implies that
        every rank has finalized the step before.
        """
        if self._finalizing is not None:
            record = self._finalizing.result()
            self._finalizing = None
            self.finalized_step = record.version.position.step
        if self._copying is not None:
            self._wait_for_copy(self._copying)

    def close(self) -> None:
        """Finish the snapshot in progress, close the connections to the buddies and end the threads."""
        self._thread.shutdown(wait=True)
        if self._copying is not None:
            self._copying.close()
            self._copying = None
        for keeper in self._receivers:
            keeper.close()
        self._receivers.clear()
        self._own.close()
        self._buddy_slots.clear()

    # ---- buddies ----------------------------------------------------------------------------------------------------

    def open_buddy_slots(self, key: ShardKey, layout: str, payload_bytes: int) -> bool:
        """Reserve the files for copies of another node's shard; False, with a warning, when there is no room."""
        slots = SnapshotSlots(self.directory, key, generation=self.generation, count=_KEPT_FILES)
        try:
            slots.open(layout=layout, payload_bytes=payload_bytes, headers=self._headers())
        except OSError as error:
            need = _KEPT_FILES * payload_bytes / 2**20
            self.warnings.append(
                f"this worker keeps no copies of another's snapshots: {self.directory}: {error.strerror}: {need:.0f} "
                "MiB are needed; raise the memory volume's size, or set checkpoint.memory.buddies to 0"
            )
            return False
        self._buddy_slots[key] = slots
        return True

    def receive_from(self, key: ShardKey, group: ProcessGroup, source: int, number: int) -> None:
        """Start to receive the snapshots of a shard for which files are open."""
        slots = self._buddy_slots[key]

        def slot() -> SnapshotFile:
            self._check_fence()
            return slots.next()

        def finalize(slot: SnapshotFile, header: Header) -> bool:
            return header.record.key == key and self.finalize_received(slot, header.record)

        self._receivers.append(SnapshotReceiver(group, source, number, slot=slot, finalize=finalize))

    def send_to(self, group: ProcessGroup, target: int, number: int) -> None:
        """Start to send each finalized snapshot to a buddy."""
        self._copying = SnapshotCopier(SnapshotSender(group, target, number))

    def _copy_on_side_stream(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> torch.cuda.Event:
        """Copy on a separate stream; the state does not change before `wait_for_snapshot`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(sources[0].device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(sources[0].device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
        copied: torch.cuda.Event = self._stream.record_event()
        return copied

    def _finalize(self, slot: SnapshotFile, version: StateVersion, copied: torch.cuda.Event | None) -> SnapshotRecord:
        if copied is not None:
            copied.synchronize()
        record = slot.finalize(version, self.key, self.layout.digest, self.config_digest)
        if self._copying is not None:
            self._copying.offer(slot, version.position.step)
        return record

    def _wait_for_copy(self, copying: SnapshotCopier) -> None:
        if not copying.wait(0.0 if self._late else _COPY_TIMEOUT_SECONDS):
            if not self._late:
                self._late = True
                self.warnings.append(
                    f"the copy of this worker's snapshot has not arrived at its buddy after "
                    f"{_COPY_TIMEOUT_SECONDS:.0f} s: until it does, a lost node costs more than one step"
                )
            return
        self._late = False
        self.buddy_step = copying.newest

    # ---- cleaning ---------------------------------------------------------------------------------------------------

    def discard_after(self, step: int, *, local: bool, others: bool) -> None:
        """Remove snapshots newer than the resumed step, which belong to an abandoned history.

        `local` (set on the writer of a shard) selects those of this shard. `others` (set on one rank) selects those of
        shards that no rank of this folder has, and also incomplete ones and those of another layout of the state.
        """
        if local:
            self._own.discard_after(step)
        if others:
            headers = self._headers()
            for path in self._foreign_files():
                header = headers.get(path)
                useful = (
                    header is not None
                    and header.record.version.position.step <= step
                    and header.record.key.has_same_layout(self.key)
                )
                if not useful:
                    path.unlink(missing_ok=True)

    def _foreign_files(self) -> list[Path]:
        mine = {str(key) for key in self.local_keys}
        return [path for path in self.directory.glob(f"*{SUFFIX}") if key_text(path) not in mine]

    # ---- internals --------------------------------------------------------------------------------------------------

    def _headers(self) -> dict[Path, Header]:
        headers: dict[Path, Header] = {}
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            if path in self._rejected:
                continue
            try:
                header = read_header(path)
            except FileNotFoundError:  # another rank of this node has removed it
                continue
            except (DamagedSnapshotError, OSError) as error:
                self._reject(path, error)
                continue
            if header is None:
                continue
            if header.config_digest != self.config_digest:
                self._rejected.add(path)
                self.warnings.append(f"memory snapshot {path.name} was written with other settings and is ignored")
                continue
            headers[path] = header
        return headers

    def _reject(self, path: Path, error: Exception) -> None:
        # The file stays until its owner reuses or removes it, because other ranks of the node may be reading it.
        self._rejected.add(path)
        self.warnings.append(f"memory snapshot is damaged and ignored: {error}")
        self._own.drop(path)

    def _fence(self) -> int:
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
        newest = self._fence()
        refuse_older_generation(str(self.directory), newest, self.generation)
        self._fence_stamp = stamp
