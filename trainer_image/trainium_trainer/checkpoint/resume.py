"""The collective that starts a run: look, decide, verify, exchange, restore.

All ranks run `Resumption.run` together. Each reports what its snapshot store holds, the first one what the durable root
holds; all evaluate the same pure decision; each verifies its part; on any damage all decide again without it.
Invariants: no rank restores a snapshot before every rank has verified its part; what comes from storage is verified
while it is read, and a rank that has read damage makes all ranks load another state; all ranks return the same position
or raise the same error; a restart that finds its snapshots costs two small gathers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainium_contract.manifest import folder_name, step_of
from trainium_trainer.checkpoint import durable
from trainium_trainer.checkpoint.agreement import (
    Claim,
    Decision,
    FromDurable,
    FromMemory,
    Moment,
    RankView,
    ShardKey,
    caretakers,
    decide,
    writers,
)
from trainium_trainer.checkpoint.commit import claim_fence
from trainium_trainer.checkpoint.errors import StorageError, UnusableCheckpointError, storage_error
from trainium_trainer.checkpoint.foreign import refuse_foreign
from trainium_trainer.checkpoint.interfaces import Position, ResumeSource
from trainium_trainer.checkpoint.layout import Layout, checksum, copy_all
from trainium_trainer.checkpoint.pairing import pair_up
from trainium_trainer.checkpoint.survey import survey
from trainium_trainer.exits import TrainerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.commit import FenceToken
    from trainium_trainer.checkpoint.interfaces import Mesh, TrainingState
    from trainium_trainer.checkpoint.memory import MemoryTier
    from trainium_trainer.checkpoint.storage import Retry, Storage
    from trainium_trainer.checkpoint.survey import Committed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks agreed on; equal on all of them but for `source` and `keeps_snapshots`."""

    position: Position | None
    source: ResumeSource
    """Where this rank's state came from."""
    keeps_snapshots: bool
    """Whether this rank writes memory snapshots (one of those that share a shard and a store does)."""
    memory_is_safe: bool
    """Whether every shard has a rank that keeps snapshots."""
    durable_step: int
    """Newest good committed step, -1 for none."""
    milestone_tokens: int
    """Position of the newest milestone; 0 for none."""
    known_bad: frozenset[str]
    """Folders of checkpoints that were found damaged."""
    leftovers: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Report:
    """What one rank tells the others in one round."""

    view: RankView
    ok: bool = True
    keeps: bool | None = None
    """Whether this rank's snapshots work; None on a rank that keeps none because a neighbour does."""
    warnings: tuple[str, ...] = ()
    error: TrainerError | None = None
    committed: tuple[Committed, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()
    """Folder and what is wrong."""
    leftovers: tuple[str, ...] = ()
    milestone_tokens: int = 0


@dataclass(slots=True)
class _Knowledge:
    """What all ranks have learnt so far; equal everywhere."""

    committed: dict[int, Committed] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    leftovers: tuple[str, ...] = ()
    milestone_tokens: int = 0
    warnings: dict[str, None] = field(default_factory=dict)
    excluded: set[Moment] = field(default_factory=set)
    """Moments that could not be exchanged."""
    broken: set[str] = field(default_factory=set)
    """Stores without room to write: their ranks help themselves, each with a buffer of its own."""


class Resumption:
    """One start of this rank; used once."""

    def __init__(
        self,
        *,
        state: TrainingState,
        mesh: Mesh,
        key: ShardKey,
        layout: Layout,
        memory: MemoryTier | None,
        storage: Storage,
        group: ProcessGroup | None,
        token: FenceToken,
        settings: Mapping[str, Any],
        config_digest: str,
        retry: Retry,
        buddies: bool = True,
    ) -> None:
        self._state = state
        self._mesh = mesh
        self._key = key
        self._layout = layout
        self._memory = memory
        self._storage = storage
        self._group = group
        self._token = token
        self._settings = settings
        self._config_digest = config_digest
        self._retry = retry
        self._buddies = buddies
        self._known = _Knowledge()
        self._payloads: dict[ShardKey, torch.Tensor] = {}
        self._keeps: bool | None = None

    def run(self) -> Outcome:
        """Find, verify and restore the newest state; raises the same TrainerError on all ranks."""
        reports = self._gather(self._look())
        self._learn(reports)
        views = [report.view for report in reports]
        self._take_role(views)
        while True:
            decision = decide(views, self._good_steps())
            reports = self._gather(self._verify(decision, views))
            self._learn(reports)
            split = self._split_broken_stores(reports)
            views = [report.view for report in reports] if not split else self._gather_views()
            if split or not all(report.ok for report in reports):
                continue
            source = self._restore(decision, views)
            if source is not None:
                return self._conclude(decision, source, reports)
            views = self._gather_views()

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def _look(self) -> _Report:
        """Round 1: the local store, and on the first rank the durable root, which it takes over."""
        try:
            if self._memory is not None:
                self._memory.claim_fence()
            report = _Report(self._view())
            if self._mesh.rank == 0:
                report = self._survey(report)
        except TrainerError as error:
            return _Report(RankView(self._mesh.rank, "", self._key, self._layout.digest), error=error)
        except OSError as error:
            problem = storage_error(error, str(self._memory.directory if self._memory else self._storage.location))
            return _Report(RankView(self._mesh.rank, "", self._key, self._layout.digest), error=problem)
        return report

    def _survey(self, report: _Report) -> _Report:
        where = self._storage.location
        self._retry.run(self._storage.prepare, where)
        self._retry.run(lambda: claim_fence(self._storage, self._token), where)
        found = self._retry.run(lambda: survey(self._storage), where)
        refuse_foreign(found, where, self._settings, self._config_digest)
        return replace(
            report,
            committed=tuple(found.committed),
            damaged=tuple(found.damaged.items()),
            leftovers=tuple(found.leftovers),
            milestone_tokens=max((item.manifest.tokens for item in found.milestones), default=0),
            warnings=tuple(f"{problem}: it is not used" for problem in found.newer.values()),
        )

    def _verify(self, decision: Decision, views: list[RankView]) -> _Report:
        """Round 2: this rank's part of what was decided."""
        self._payloads.clear()
        report = _Report(self._view(), keeps=self._keeps)
        if isinstance(decision, FromMemory):
            wanted = {self._key} | {
                transfer.key for batch in decision.rounds for transfer in batch if transfer.source == self._mesh.rank
            }
            opened = [self._open(key, decision, views) for key in sorted(wanted)]
            ok = all(opened)
            return replace(report, ok=ok, view=self._view(), warnings=self._memory_warnings())
        # What is read from storage is verified while it is read, see `_restore`.
        return replace(report, warnings=self._memory_warnings())

    def _open(self, key: ShardKey, decision: FromMemory, views: list[RankView]) -> bool:
        """Verify one shard in this rank's store; True also when the store does not have it and will receive it."""
        claim = self._claim_in(views[self._mesh.rank], decision, key)
        if claim is None or self._memory is None:
            return True
        payload = self._memory.open_claim(claim)
        if payload is None:
            return False
        self._payloads[key] = payload
        return True

    def _learn(self, reports: list[_Report]) -> None:
        """Take in a round's reports; raises when a rank has failed or when nothing that is there can be used."""
        for report in reports:
            if report.error is not None:
                raise report.error
            self._known.committed.update({item.step: item for item in report.committed})
            self._known.leftovers += report.leftovers
            self._known.milestone_tokens = max(self._known.milestone_tokens, report.milestone_tokens)
            for name, problem in report.damaged:
                self._known.bad[name] = problem
                what = f"checkpoint of step {step_of(name)}" if step_of(name) is not None else name
                self._known.warnings[f"{what} is damaged and not used: {problem}"] = None
            self._known.warnings.update(dict.fromkeys(report.warnings))

    # ---- restoring --------------------------------------------------------------------------------------------------

    def _restore(self, decision: Decision, views: list[RankView]) -> ResumeSource | None:
        """Fill the live state; None on all ranks when that failed on one and another state must be tried."""
        if isinstance(decision, FromMemory):
            return self._restore_from_memory(decision, views)
        if isinstance(decision, FromDurable):
            reports = self._gather(self._load(self._known.committed[decision.step]))
            self._learn(reports)
            return ResumeSource.DURABLE if all(report.ok for report in reports) else None
        bad = {name: problem for name, problem in self._known.bad.items() if step_of(name) is not None}
        if bad:
            problems = "; ".join(bad[name] for name in sorted(bad))
            raise UnusableCheckpointError(
                f"{self._storage.location} holds checkpoints but none is whole ({problems}): restore one from a "
                "backup, or choose another checkpoint.path to start again from the beginning"
            )
        return ResumeSource.FRESH

    def _load(self, checkpoint: Committed) -> _Report:
        """Fill the live state from storage; the report tells the others of damage, or of a store that fails."""
        report = _Report(self._view(), keeps=self._keeps)
        try:
            durable.load(self._storage, checkpoint, self._state, self._retry)
        except BaseException as error:
            cause = durable.explain(error, self._storage.location)
            if isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
                raise cause from error
            if isinstance(cause, StorageError):
                # It says nothing about the checkpoint: the run ends here and tries again later.
                return replace(report, ok=False, error=cause)
            return replace(report, ok=False, damaged=((folder_name(checkpoint.step), f"it cannot be loaded: {cause}"),))
        return report

    def _restore_from_memory(self, decision: FromMemory, views: list[RankView]) -> ResumeSource | None:
        source = ResumeSource.MEMORY if self._key in self._payloads else ResumeSource.PEER
        if decision.rounds:
            ok = self._exchange(decision, views)
            # Also a barrier: after it the neighbours of a receiver find the shard in their common store.
            reports = self._gather(_Report(self._view(), ok=ok, keeps=self._keeps))
            if not all(report.ok for report in reports):
                self._known.excluded.add(decision.moment)
                self._known.warnings["a snapshot arrived altered at a peer: an older state is used"] = None
                return None
            views = [report.view for report in reports]
        payload = self._payloads.get(self._key)
        if payload is None and self._memory is not None:
            claim = self._claim_in(views[self._mesh.rank], decision, self._key)
            payload = None if claim is None else self._memory.open_claim(claim)
        assert payload is not None, "every rank has its shard after the exchange"
        copy_all(self._layout.ordered(self._state.local_tensors()), self._layout.views(payload))
        return source

    def _exchange(self, decision: FromMemory, views: list[RankView]) -> bool:
        """Send and receive snapshots in the decided rounds; False when one arrived altered."""
        ok = True
        me = self._mesh.rank
        for batch in decision.rounds:
            work = []
            arriving: torch.Tensor | None = None
            slot = None
            for number, transfer in enumerate(batch):
                if transfer.source == me:
                    payload = self._payloads[transfer.key]
                    work.append(dist.isend(payload, transfer.target, group=self._group, tag=number))
                if transfer.target == me:
                    slot = self._memory.receiving_slot() if self._memory is not None and self._keeps else None
                    arriving = (
                        torch.empty(self._layout.payload_bytes, dtype=torch.uint8) if slot is None else slot.payload
                    )
                    work.append(dist.irecv(arriving, transfer.source, group=self._group, tag=number))
            for each in work:
                if each is not None:
                    each.wait()
            if arriving is not None:
                claim = self._original(decision, views)
                if slot is not None and self._memory is not None:
                    ok = self._memory.seal_received(slot, claim) and ok
                else:
                    ok = checksum(arriving) == claim.checksum and ok
                self._payloads[self._key] = arriving
        return ok

    def _original(self, decision: FromMemory, views: list[RankView]) -> Claim:
        """The claim of the snapshot that this rank's copy stems from: walk the tree up to the store that held it."""
        parent = {(t.target, t.key): t.source for batch in decision.rounds for t in batch}
        rank = self._mesh.rank
        while (claim := self._claim_in(views[rank], decision, self._key)) is None:
            rank = parent[rank, self._key]
        return claim

    def _good_steps(self) -> list[int]:
        return [step for step in self._known.committed if folder_name(step) not in self._known.bad]

    # ---- small parts ------------------------------------------------------------------------------------------------

    def _view(self) -> RankView:
        if self._memory is None:
            return RankView(self._mesh.rank, f"rank-{self._mesh.rank}", self._key, self._layout.digest)
        store = self._memory.store_id()
        if store in self._known.broken:
            store = f"{store}#{self._mesh.rank}"
        claims = frozenset(claim for claim in self._memory.claims() if claim.moment not in self._known.excluded)
        return RankView(self._mesh.rank, store, self._key, self._layout.digest, claims)

    @staticmethod
    def _claim_in(view: RankView, decision: FromMemory, key: ShardKey) -> Claim | None:
        fitting = (claim for claim in view.claims if claim.moment == decision.moment and claim.key == key)
        return min(fitting, default=None)

    def _take_role(self, views: list[RankView]) -> None:
        """Open the snapshot files when this rank is the one that writes them."""
        if self._memory is None:
            self._keeps = False
            return
        store = views[self._mesh.rank].store
        self._memory.local_keys = frozenset(view.needs for view in views if view.store == store)
        self._keeps = self._memory.open_slots() if self._mesh.rank in writers(views) else None

    def _memory_warnings(self) -> tuple[str, ...]:
        return () if self._memory is None else tuple(f"rank {self._mesh.rank}: {w}" for w in self._memory.warnings)

    def _split_broken_stores(self, reports: list[_Report]) -> bool:
        """Whether a store that several ranks share turned out to have no room: exchanges are then planned anew."""
        stores = [report.view.store for report in reports]
        broken = {store for store, report in zip(stores, reports, strict=True) if report.keeps is False}
        broken = {store for store in broken if stores.count(store) > 1}
        self._known.broken |= broken
        return bool(broken)

    def _gather_views(self) -> list[RankView]:
        return [report.view for report in self._gather(_Report(self._view()))]

    def _conclude(self, decision: Decision, source: ResumeSource, reports: list[_Report]) -> Outcome:
        position: Position | None = None
        if isinstance(decision, FromMemory):
            position = decision.moment.position
        elif isinstance(decision, FromDurable):
            manifest = self._known.committed[decision.step].manifest
            position = Position(step=manifest.step, samples=manifest.samples, tokens=manifest.tokens)
        views = [report.view for report in reports]
        if self._memory is not None:
            step = -1 if position is None else position.step
            others = self._mesh.rank in caretakers(views)
            self._memory.forget_after(step, own=bool(self._keeps), others=others)
        if self._buddies and self._group is not None:
            broken = {report.view.store for report in reports if report.keeps is False}
            self._known.warnings.update(dict.fromkeys(pair_up(self._memory, self._group, views, broken)))
        return Outcome(
            position=position,
            source=source,
            keeps_snapshots=bool(self._keeps),
            memory_is_safe=all(report.keeps is not False for report in reports),
            durable_step=max(self._good_steps(), default=-1),
            milestone_tokens=self._known.milestone_tokens,
            known_bad=frozenset(self._known.bad),
            leftovers=self._known.leftovers,
            warnings=tuple(self._known.warnings),
        )

    def _gather(self, report: _Report) -> list[_Report]:
        if self._group is None:
            return [report]
        reports: list[_Report | None] = [None] * self._mesh.world_size
        dist.all_gather_object(reports, report, group=self._group)
        return [each for each in reports if each is not None]
