"""The collective that starts a run: locate, decide, verify, exchange, restore.

All ranks run `Resumption.run` together. Each reports what its snapshot store holds. The first rank, which has read the
durable root too, decides (`first_rank.py`) and sends each its part; on any damage it decides again without it.

Guarantees:
- No rank restores a snapshot before every rank has verified its part.
- What comes from storage is verified while it is read; when a rank reads damage, all ranks load another state.
- All ranks return the same position or raise the same error.
- A restart that finds its snapshots costs three rounds up and down a tree: the places of all, their snapshots, which
  are reported once, and whether these are whole. A rank receives what concerns it and its node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainium_contract.wire.checkpoint_manifest import folder_name
from trainium_trainer.checkpoint.collectives import scatter_from_root
from trainium_trainer.checkpoint.errors import explain_failure
from trainium_trainer.checkpoint.format import contents
from trainium_trainer.checkpoint.format.live_state import copy_all
from trainium_trainer.checkpoint.interfaces import ResumeSource
from trainium_trainer.checkpoint.resume.agreement import FromDurable, FromMemory, RankView, claims_to_report, writers
from trainium_trainer.checkpoint.resume.first_rank import (
    Agreed,
    Capacity,
    Check,
    ClaimReport,
    Done,
    Exchange,
    Load,
    Order,
    RankReport,
    ReplicaTask,
    ResumeLeader,
    assignments_of,
    tasks_of,
)
from trainium_trainer.checkpoint.root.commit_lease import refuse_foreign
from trainium_trainer.storage.errors import StorageError, storage_error
from trainium_worker.snapshot import checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.memory.memory_tier import MemoryTier
    from trainium_trainer.checkpoint.memory.snapshot import BufferLayout, Claim, ShardKey
    from trainium_trainer.checkpoint.root.commit_lease import CommitLease
    from trainium_trainer.checkpoint.root.survey import Committed
    from trainium_trainer.checkpoint.session import Session


@dataclass(frozen=True, slots=True)
class ResumeOutcome:
    """The agreement of the ranks, and this rank's part."""

    agreed: Agreed
    source: ResumeSource
    """Source of this rank's state."""
    keeps_snapshots: bool
    """Whether this rank writes memory snapshots (one of those that share a shard and a store does)."""
    leftovers: tuple[str, ...]
    """On the first rank."""
    warnings: tuple[str, ...]
    """On the first rank all, else the first of them."""


class Resumption:
    """One start of this rank; used once."""

    def __init__(
        self,
        session: Session,
        *,
        key: ShardKey,
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
        self._leader = ResumeLeader(self._storage.location, self._buddies, lease.generation)
        self._payloads: dict[ShardKey, torch.Tensor] = {}
        self._origin: Claim | None = None
        self._keeps: bool | None = None
        self._warned = 0

    def run(self) -> ResumeOutcome:
        """Find, verify and restore the newest state; raises the same TrainerError on all ranks."""
        leader = self._leader
        neighbours = scatter_from_root(self._locate, leader.collect, self._group, "resume: who is where")
        self._take_role(neighbours)
        order: Order = scatter_from_root(
            lambda: self._offer(neighbours), leader.decide, self._group, "resume: what is there"
        )
        source = ResumeSource.FRESH
        while not isinstance(order, Done):
            report = self._carry_out(order)
            if isinstance(order, Check):
                source = ResumeSource.MEMORY if self._key in self._payloads else ResumeSource.PEER
            elif isinstance(order, Load):
                source = ResumeSource.DURABLE
            order = self._report(report)
        return self._conclude(order, source)

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def _locate(self) -> RankView:
        """Return the local store, and on the first rank the durable root, which it takes over."""
        try:
            if self._memory is not None:
                self._memory.claim_fence()
            store = f"rank-{self._mesh.rank}" if self._memory is None else self._memory.store_id()
            if self._mesh.rank == 0:
                self._survey()
        except OSError as error:
            where = str(self._memory.directory if self._memory else self._storage.location)
            raise storage_error(error, where) from error
        return RankView(self._mesh.rank, store, self._key, self._layout.digest)

    def _survey(self) -> None:
        where = self._storage.location
        try:
            found, problem = self._lease.acquire(
                lambda found: refuse_foreign(found, where, self._settings, self._config_digest)
            )
        except StorageError as error:
            self._leader.record_problem(error)
        else:
            self._leader.record_survey(found, problem)

    def _offer(self, neighbours: Sequence[RankView]) -> ClaimReport:
        """Report the claims of this rank's store that this rank represents."""
        if self._memory is None:
            return ClaimReport(keeps=self._keeps)
        claims = claims_to_report(neighbours, self._mesh.rank, self._memory.claims())
        return ClaimReport(claims, self._keeps, self._new_warnings())

    def _carry_out(self, order: Check | Exchange | Load) -> RankReport:
        if isinstance(order, Check):
            return self._check(order.claims)
        if isinstance(order, Exchange):
            return RankReport(ok=self._exchange(order))
        return self._load(order.checkpoint)

    def _report(self, report: RankReport) -> Order:
        """Report how it went and return the next order. Collective."""
        return scatter_from_root(lambda: report, self._leader.next_orders, self._group, "resume: how it went")

    def _check(self, claims: Sequence[Claim]) -> RankReport:
        """Open and verify snapshots: of the own shard if this store has it, and what others will be sent."""
        self._payloads.clear()
        self._origin = None
        lost: set[Claim] = set()
        for claim in claims:
            payload = None if self._memory is None else self._memory.open_claim(claim)
            if payload is None:
                lost.add(claim)
            else:
                self._payloads[claim.key] = payload
        return RankReport(not lost, frozenset(lost), self._new_warnings())

    def _load(self, checkpoint: Committed) -> RankReport:
        """Fill the live state from storage; the report has damage, or the error of a store that fails."""
        try:
            contents.load(self._storage, checkpoint, self._state, self._retry)
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
        """Send and receive snapshots in the decided rounds; False when one arrived altered."""
        ok = True
        me = self._mesh.rank
        self._origin = order.origin
        for number in sorted({move.round for move in order.moves}):
            work = []
            arriving: torch.Tensor | None = None
            slot = None
            for move in (move for move in order.moves if move.round == number):
                if move.source == me:
                    payload = self._payloads[move.key]
                    work.append(dist.isend(payload, move.target, group=self._group, tag=move.tag))
                if move.target == me:
                    slot = self._memory.receiving_slot() if self._memory is not None and self._keeps else None
                    arriving = (
                        torch.empty(self._layout.payload_bytes, dtype=torch.uint8) if slot is None else slot.payload
                    )
                    work.append(dist.irecv(arriving, move.source, group=self._group, tag=move.tag))
            for each in work:
                if each is not None:
                    each.wait()
            if arriving is not None:
                if slot is not None and self._memory is not None:
                    ok = self._memory.finalize_received(slot, order.origin) and ok
                else:
                    ok = checksum(arriving) == order.origin.checksum and ok
                self._payloads[self._key] = arriving
        return ok

    # ---- small parts ------------------------------------------------------------------------------------------------

    def _take_role(self, neighbours: Sequence[RankView]) -> None:
        """Open the snapshot files when this rank is the one that writes them."""
        if self._memory is None:
            self._keeps = False
            return
        self._memory.local_keys = frozenset(view.needs for view in neighbours)
        self._keeps = self._memory.open_slots() if self._mesh.rank in writers(neighbours) else None

    def _new_warnings(self) -> tuple[str, ...]:
        """Return the warnings of the memory tier since the last call."""
        if self._memory is None:
            return ()
        new = self._memory.warnings[self._warned :]
        self._warned += len(new)
        return tuple(f"rank {self._mesh.rank}: {warning}" for warning in new)

    def _restore_from_memory(self) -> None:
        payload = self._payloads.get(self._key)
        if payload is None and self._memory is not None and self._origin is not None:
            payload = self._memory.open_claim(self._origin)
        assert payload is not None, "every rank has its shard after the exchange"
        copy_all(self._layout.ordered(self._state.local_tensors()), self._layout.views(payload))

    def _conclude(self, done: Done, source: ResumeSource) -> ResumeOutcome:
        agreed, leader = done.agreed, self._leader
        if isinstance(agreed.decision, FromMemory):
            self._restore_from_memory()
        elif not isinstance(agreed.decision, FromDurable):
            source = ResumeSource.FRESH
        if self._memory is not None:
            step = -1 if agreed.position is None else agreed.position.step
            self._memory.forget_after(step, own=bool(self._keeps), others=done.cleans_up)
        first = self._mesh.rank == 0
        warnings = dict.fromkeys(leader.warnings if first else agreed.warnings)
        if agreed.guarded and self._group is not None:
            warnings.update(dict.fromkeys(self._assign_buddies(self._group)))
        return ResumeOutcome(agreed, source, bool(self._keeps), leader.leftovers, tuple(warnings))

    # ---- copies on other nodes --------------------------------------------------------------------------------------

    def _assign_buddies(self, group: ProcessGroup) -> tuple[str, ...]:
        """Agree on who keeps copies of shards that only one node holds, and start copying; return warnings. Collective.

        A shard whose buddy has no space gets no copy, with a warning.
        """
        memory, wanted, views = self._memory, self._leader.wanted, self._leader.views
        size = 0 if memory is None else memory.layout.payload_bytes
        # Also a barrier: leftovers are cleared everywhere before anyone makes new files.
        tasks = scatter_from_root(lambda: size, lambda sizes: tasks_of(wanted, views, sizes), group, "resume: copies")
        capacity = self._reserve(tasks)
        assignment = scatter_from_root(
            lambda: capacity,
            lambda capacities: assignments_of(wanted, views, capacities),
            group,
            "resume: space for copies",
        )
        if memory is not None:
            memory.local_keys |= assignment.keys
            for task in (task for task in tasks if task.number in assignment.numbers):
                if task.guard.target == self._mesh.rank:
                    memory.keep_for(task.guard.key, group, task.guard.source, task.number)
                if task.guard.source == self._mesh.rank:
                    memory.send_to(group, task.guard.target, task.number)
        return assignment.warnings

    def _reserve(self, tasks: Sequence[ReplicaTask]) -> Capacity:
        """Reserve files for the copies that this rank is to keep."""
        memory, rank, numbers = self._memory, self._mesh.rank, set[int]()
        if memory is None:
            return Capacity(frozenset(), ())
        known = len(memory.warnings)
        for task in tasks:
            if task.guard.target == rank and memory.open_kept(task.guard.key, task.layout, task.payload_bytes):
                numbers.add(task.number)
        return Capacity(frozenset(numbers), tuple(f"rank {rank}: {warning}" for warning in memory.warnings[known:]))
