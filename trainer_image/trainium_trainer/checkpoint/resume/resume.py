"""The collective that starts a run: locate, decide, verify, exchange, restore.

All ranks run `Resumption.run` together. Each rank reports the contents of its snapshot store. Rank 0, which
also has read the durable root, decides (`leader.py`) and sends each rank its order; on any damage it decides again
without the damaged part.

Guarantees:
- No rank restores a snapshot before every rank has verified its part.
- State from storage is verified while it is read; when a rank finds damage, all ranks load another state.
- All ranks return the same position or raise the same error.
- A restart that finds its snapshots costs three rounds up and down a tree: the locations of the ranks, their snapshots,
  each reported once, and the outcome of the verification. A rank receives only what concerns it and its node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainium_contract.wire.checkpoint_manifest import folder_name
from trainium_trainer.checkpoint.collectives import disable_gc, scatter_from_root
from trainium_trainer.checkpoint.errors import explain_failure
from trainium_trainer.checkpoint.format.live_state import copy_all
from trainium_trainer.checkpoint.format.reader import load_checkpoint
from trainium_trainer.checkpoint.interfaces import ResumeSource
from trainium_trainer.checkpoint.resume.agreement import (
    RankView,
    ResumeFromDurable,
    ResumeFromMemory,
    find_snapshot_writers,
    select_records,
)
from trainium_trainer.checkpoint.resume.leader import (
    Agreement,
    Exchange,
    Finish,
    Load,
    Order,
    RankReport,
    ReplicaCapacity,
    ReplicaTask,
    ResumeLeader,
    SnapshotReport,
    Verify,
    assign_replicas,
    plan_replicas,
)
from trainium_trainer.checkpoint.root.run_settings import refuse_foreign
from trainium_trainer.storage.errors import StorageError, create_storage_error
from trainium_worker.snapshots.copies import transfer
from trainium_worker.snapshots.files import checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.interfaces import Session
    from trainium_trainer.checkpoint.memory.layout import BufferLayout
    from trainium_trainer.checkpoint.memory.memory_tier import MemoryTier
    from trainium_trainer.checkpoint.root.commit_lease import CommitLease
    from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint
    from trainium_worker.snapshots.files import Part, SnapshotFile


@dataclass(frozen=True, slots=True)
class ResumeOutcome:
    """The agreed result, and this rank's part of it."""

    agreed: Agreement
    source: ResumeSource
    """The source of this rank's state."""
    writes_snapshots: bool
    """Whether this rank writes memory snapshots (one of the ranks that share a shard and a store does)."""
    leftovers: tuple[str, ...]
    """The leftovers to remove; set on rank 0."""
    warnings: tuple[str, ...]
    """All warnings on rank 0, the first few on the others."""


class Resumption:
    """One start of this rank; an instance is used once."""

    def __init__(
        self,
        session: Session,
        *,
        key: str,
        layout: BufferLayout,
        memory: MemoryTier | None,
        lease: CommitLease,
    ) -> None:
        self._state, self._mesh, self._group = session.state, session.mesh, session.group
        self._storage, self._retry = session.storage, session.retry
        self._settings, self._config_digest = session.settings, session.config_digest
        self._key = key
        self._layout = layout
        self._memory = memory
        self._lease = lease
        self._buddies = session.config.memory.buddies > 0
        self._leader = ResumeLeader(self._storage.location, self._buddies, lease.token.generation)
        self._payloads: dict[str, torch.Tensor] = {}
        self._origin: Part | None = None
        self._can_write: bool | None = None

    @disable_gc()
    def run(self) -> ResumeOutcome:
        """Find, verify and restore the newest state; raises the same TrainerError on all ranks."""
        leader = self._leader
        neighbours = scatter_from_root(self._locate, leader.collect, self._group, "resume: stores")
        self._open_snapshots(neighbours)
        order: Order = scatter_from_root(
            lambda: self._report_records(neighbours), leader.decide, self._group, "resume: snapshots"
        )
        source = ResumeSource.FRESH
        while not isinstance(order, Finish):
            report = self._execute(order)
            if isinstance(order, Verify):
                source = ResumeSource.MEMORY if self._key in self._payloads else ResumeSource.PEER
            elif isinstance(order, Load):
                source = ResumeSource.DURABLE
            order = self._report(report)
        return self._finish(order, source)

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def _locate(self) -> RankView:
        """Return the local store, and acquire the durable root on rank 0."""
        try:
            if self._memory is not None:
                self._memory.claim_fence()
            store = f"rank-{self._mesh.rank}" if self._memory is None else self._memory.store_id()
            if self._mesh.rank == 0:
                self._survey()
        except OSError as error:
            location = str(self._memory.directory if self._memory else self._storage.location)
            raise create_storage_error(error, location) from error
        return RankView(self._mesh.rank, store, self._key, self._layout.digest)

    def _survey(self) -> None:
        location = self._storage.location
        try:
            survey, problem = self._lease.acquire(
                lambda survey: refuse_foreign(survey, location, self._settings, self._config_digest)
            )
        except StorageError as error:
            self._leader.record_problem(error)
        else:
            self._leader.record_survey(survey, problem)

    def _report_records(self, neighbours: Sequence[RankView]) -> SnapshotReport:
        """Return the records of the store that this rank represents."""
        if self._memory is None:
            return SnapshotReport(can_write=self._can_write)
        records = select_records(neighbours, self._mesh.rank, self._memory.list_records().values())
        return SnapshotReport(records, self._can_write, self._take_warnings())

    def _execute(self, order: Verify | Exchange | Load) -> RankReport:
        if isinstance(order, Verify):
            return self._check(order.records)
        if isinstance(order, Exchange):
            return RankReport(ok=self._exchange(order))
        return self._load(order.checkpoint)

    def _report(self, report: RankReport) -> Order:
        """Report the outcome and return the next order. Collective."""
        return scatter_from_root(lambda: report, self._leader.decide_orders, self._group, "resume: outcome")

    def _check(self, records: Sequence[Part]) -> RankReport:
        """Open and verify snapshots: that of this rank's shard if the store has it, and those to send to others."""
        self._payloads.clear()
        self._origin = None
        unreadable: set[Part] = set()
        for record in records:
            payload = None if self._memory is None else self._memory.open_part(record)
            if payload is None:
                unreadable.add(record)
            else:
                self._payloads[record.name] = payload
        return RankReport(not unreadable, frozenset(unreadable), self._take_warnings())

    def _load(self, checkpoint: CommittedCheckpoint) -> RankReport:
        """Fill the live state from storage; the report has the damage, or the error of a store that fails."""
        try:
            load_checkpoint(self._storage, checkpoint, self._state, self._retry)
        except BaseException as error:
            cause = explain_failure(error, self._storage.location)
            if isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
                raise cause from error
            if isinstance(cause, StorageError):
                # The checkpoint may be whole: the run ends here and retries later.
                return RankReport(ok=False, error=cause)
            return RankReport(ok=False, damaged=((folder_name(checkpoint.step), f"it cannot be loaded: {cause}"),))
        return RankReport()

    def _exchange(self, order: Exchange) -> bool:
        """Send and receive snapshots in the decided rounds; return False when one arrived altered."""
        ok, rank, memory = True, self._mesh.rank, self._memory
        assert self._group is not None, "there are other ranks"
        self._origin = order.origin
        for transfers in order.rounds:
            into: list[tuple[int, torch.Tensor]] = []
            file: SnapshotFile | None = None
            for source in (move.source for move in transfers if move.target == rank):
                file = memory.create_receiving_file() if memory is not None and self._can_write else None
                payload = torch.empty(self._layout.payload_bytes, dtype=torch.uint8) if file is None else file.payload
                into.append((source, payload))
            sends = [(move.target, self._payloads[move.key]) for move in transfers if move.source == rank]
            transfer(self._group, 0, sends=sends, into=into)
            for _, payload in into:
                ok = (
                    checksum(payload) == order.origin.checksum if file is None else file.finish_received(order.origin)
                ) and ok
                self._payloads[self._key] = payload
        return ok

    # ---- small parts ------------------------------------------------------------------------------------------------

    def _open_snapshots(self, neighbours: Sequence[RankView]) -> None:
        """Open the snapshot files if this rank writes them."""
        if self._memory is None:
            self._can_write = False
            return
        self._memory.local_names = frozenset(view.needs for view in neighbours)
        self._can_write = self._memory.open_files() if self._mesh.rank in find_snapshot_writers(neighbours) else None

    def _take_warnings(self) -> tuple[str, ...]:
        """Return the warnings of the memory tier since the last call."""
        new = [] if self._memory is None else self._memory.take_warnings()
        return tuple(f"rank {self._mesh.rank}: {warning}" for warning in new)

    def _restore_from_memory(self) -> None:
        payload = self._payloads.get(self._key)
        if payload is None and self._memory is not None and self._origin is not None:
            payload = self._memory.open_part(self._origin)
        assert payload is not None, "every rank has its shard after the exchange"
        copy_all(self._layout.sort_tensors(self._state.list_local_tensors()), self._layout.view_tensors(payload))

    def _finish(self, finish: Finish, source: ResumeSource) -> ResumeOutcome:
        agreed, leader = finish.agreed, self._leader
        if isinstance(agreed.decision, ResumeFromMemory):
            self._restore_from_memory()
        elif not isinstance(agreed.decision, ResumeFromDurable):
            source = ResumeSource.FRESH
        if self._memory is not None:
            step = -1 if agreed.position is None else agreed.position.step
            self._memory.discard_after(step, local=bool(self._can_write), others=finish.cleans_up)
        first = self._mesh.rank == 0
        warnings = dict.fromkeys(leader.warnings if first else agreed.warnings)
        if agreed.needs_buddies and self._group is not None:
            warnings.update(dict.fromkeys(self._assign_buddies(self._group)))
        return ResumeOutcome(agreed, source, bool(self._can_write), leader.leftovers, tuple(warnings))

    # ---- copies on other nodes --------------------------------------------------------------------------------------

    def _assign_buddies(self, group: ProcessGroup) -> tuple[str, ...]:
        """Agree on buddies for shards that only one node holds, and start copying; return warnings. Collective.

        A shard whose buddy has no space gets no copy, with a warning.
        """
        memory, wanted, views = self._memory, self._leader.buddy_copies, self._leader.views
        size = 0 if memory is None else memory.layout.payload_bytes
        # Also a barrier: leftovers are removed everywhere before a rank creates new files.
        tasks = scatter_from_root(
            lambda: size, lambda sizes: plan_replicas(wanted, views, sizes), group, "resume: copies"
        )
        capacity = self._reserve(tasks)
        assignment = scatter_from_root(
            lambda: capacity,
            lambda capacities: assign_replicas(wanted, views, capacities),
            group,
            "resume: capacity for copies",
        )
        if memory is not None:
            memory.local_names |= assignment.keys
            for task in (task for task in tasks if task.number in assignment.numbers):
                if task.copy.target == self._mesh.rank:
                    memory.receive_from(task.copy.key, group, task.copy.source, task.number)
                if task.copy.source == self._mesh.rank:
                    memory.send_to(group, task.copy.target, task.number)
        return assignment.warnings

    def _reserve(self, tasks: Sequence[ReplicaTask]) -> ReplicaCapacity:
        """Reserve files for the copies that this rank keeps."""
        memory, rank, numbers = self._memory, self._mesh.rank, set[int]()
        if memory is None:
            return ReplicaCapacity(frozenset(), ())
        for task in tasks:
            if task.copy.target == rank and memory.open_copy_files(task.copy.key, task.layout, task.payload_bytes):
                numbers.add(task.number)
        return ReplicaCapacity(frozenset(numbers), self._take_warnings())
