"""When the training state is saved, and what the loop calls: the policy over memory tier and durable tier.

Order of a step: `before_update`, the step's own all-reduce (which also sums `vote`), the optimizer step, `after_step`.

Guarantees:
- All ranks start a durable save at the same step, because they act on the same sum of votes.
- A save that is due while one is under way is skipped, never queued.
- The training thread copies memory and nothing else: hashing, writing, communicating and committing happen elsewhere.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from trainium_trainer.checkpoint.durable.durable_tier import AfterMilestone, DurableTier
from trainium_trainer.checkpoint.durable.save_policy import Save, SavePolicy, decided, vote
from trainium_trainer.checkpoint.errors import TooSlowError
from trainium_trainer.checkpoint.interfaces import MeshPlace, Position, ResumeSource, TrainingState
from trainium_trainer.checkpoint.memory.memory_tier import MemoryTier
from trainium_trainer.checkpoint.memory.snapshot import BufferLayout, Moment, ShardKey
from trainium_trainer.checkpoint.resume.resume import ResumeOutcome, Resumption
from trainium_trainer.checkpoint.root.commit import FenceToken
from trainium_trainer.checkpoint.root.commit_lease import CommitLease, settings_digest
from trainium_trainer.checkpoint.root.late_step_check import OwnershipCheck
from trainium_trainer.checkpoint.root.metrics_copy import RecordCopies
from trainium_trainer.checkpoint.root.owner import OwnerRecords, Start
from trainium_trainer.checkpoint.session import Session
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.opening import open_storage
from trainium_trainer.storage.protocol import Retry, Storage
from trainium_worker.snapshot import directory_of_run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from trainium_contract.trainer.checkpoint import CheckpointConfig

log = logging.getLogger(__name__)

NONE_YET = -1
_GROUP_TIMEOUT = timedelta(hours=2)
"""Ranks that have written wait this long for the slowest; a lost peer is noticed at once, by its connection."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of a manager: where it writes, how often it retries, its clock."""

    storage: Storage | None = None
    """None: what the configured path names."""
    retry: Retry = field(default_factory=Retry)
    clock: Callable[[], float] = time.monotonic


class CheckpointManager:
    """Checkpoints of one rank; every method is called from the training thread.

    `settings`: what must not change between the runs of one history, by name; values that JSON can hold.
    `memory_step`, `durable_step`: newest safe step of each tier, -1 for none; `buddy_step`: of the copy that another
    node has of this rank's shard, -1 where the shard needs or has none. `resumed_from`: where the state came
    from. `warnings`: sentences about what was damaged or is switched off.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        state: TrainingState,
        mesh: MeshPlace,
        start: Start,
        memory_directory: Path | None,
        settings: Mapping[str, Any],
        after_milestone: AfterMilestone | None = None,
        outside: Environment | None = None,
    ) -> None:
        self._config = config
        self._state = state
        self._mesh = mesh
        self._start = start
        self._settings = settings
        self._config_digest = settings_digest(settings)
        outside = outside or Environment()
        self._storage = outside.storage if outside.storage is not None else open_storage(config.path)
        self._retry = outside.retry
        self._clock = outside.clock
        self._after_milestone = after_milestone
        self._memory_directory: Path | None = None
        if memory_directory is not None and config.memory.every_steps:
            self._memory_directory = directory_of_run(memory_directory, start.name or self._storage.location)
        self._memory: MemoryTier | None = None
        self._durable: DurableTier | None = None
        self._token = FenceToken(start.generation, start.name, "")
        self._lease = self._new_lease()
        self._ownership_check = OwnershipCheck(self._check_owner)
        self._group: ProcessGroup | None = None
        self._session = ""
        self._keeps_snapshots = False
        self._memory_is_safe = False
        self._completed = 0
        self._snapshot_step = NONE_YET
        self._memory_warnings = 0
        self._policy = SavePolicy(config.durable, config.milestones)
        self._saves = 0
        self.memory_step = NONE_YET
        self.resumed_from = ResumeSource.FRESH
        self.warnings: list[str] = []

    # ---- start ------------------------------------------------------------------------------------------------------

    def resume(self) -> Position | None:
        """Restore the newest state that all ranks can have; None when there is none. Collective, called once.

        StorageError: the durable root cannot be used. StaleGenerationError: a newer start of the run owns it.
        UnusableCheckpointError: what is there cannot be continued, a person must decide.
        """
        self._open_group()
        key = self._shard_key()
        layout = BufferLayout.of(self._state.local_tensors())
        self._memory = self._open_memory(key, layout)
        token = self._token = FenceToken(self._start.generation, self._start.name, self._session)
        self._lease = self._new_lease()
        session = Session(
            state=self._state,
            mesh=self._mesh,
            group=self._group,
            storage=self._storage,
            retry=self._retry,
            config=self._config,
            settings=self._settings,
            config_digest=self._config_digest,
        )
        outcome = Resumption(session, key=key, layout=layout, memory=self._memory, lease=self._lease).run()
        self._adopt(outcome, session, token)
        if self._memory is not None:
            self._memory_warnings = len(self._memory.warnings)  # reported with the outcome
        return outcome.agreed.position

    # ---- in a step --------------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Before the last collective of a step: wait (normally for nothing) until the previous snapshot is finalized.

        The completion of a step on any rank then implies that every rank has the state before it.
        """
        if self._memory is not None:
            self._memory.wait_for_snapshot()
            self._record_finalized()

    def vote(self) -> int:
        """Return this rank's vote on a durable save after the step under way, to be summed in the step's all-reduce."""
        tier = self._tier()
        wanted = Save.NOTHING
        if self._mesh.rank == 0:
            wanted = self._policy.wanted(step=self._completed + 1, now=self._clock())
        return vote(wanted, busy=tier.busy)

    def check_owner(self, since: float) -> None:
        """StaleGenerationError when the run has gone on without this rank; asked before something is recorded.

        `since`: a moment (`time.monotonic`) after which its peers still needed it for the step. The store is asked only
        when the step took clearly longer than those before it, see `OwnershipCheck`.
        """
        self._ownership_check.confirm(since)

    def after_step(self, position: Position, votes: int) -> None:
        """After the optimizer step: snapshot to memory, start a durable save when `votes`, the sum, decides it.

        A save that failed is reported in `warnings`. Raises StorageError when too many in a row have failed, when one
        does not end, or when a snapshot cannot be written; StaleGenerationError when another start owns the root.
        """
        self._observe_saves()
        self._completed = position.step
        every = self._config.memory.every_steps
        if every and position.step % every == 0:
            self._snapshot(position)
        what = decided(votes)
        if not self._policy.crosses(position.tokens):
            what &= ~Save.MILESTONE
        if what is not Save.NOTHING:
            self._save(position, what)

    # ---- end --------------------------------------------------------------------------------------------------------

    def save_before_exit(self, position: Position, *, memory_ends: bool = False) -> None:
        """Make `position` safe before leaving on request; all ranks together.

        In memory where that is enough; durable when a rank has no memory tier or loses it (`memory_ends`), or when the
        state is sharded over the data-parallel ranks, because the next membership will hardly have the same shards.
        """
        self._snapshot(position)
        self.before_update()
        is_in_memory = self._memory_is_safe and not memory_ends
        if is_in_memory and not self._mesh.dp_mode.is_sharded:
            return
        self._tier().hurried.set()
        try:
            self._finish(position, retries=0)
        except TooSlowError:
            raise
        except StorageError as error:
            if not is_in_memory:
                raise
            self._report(f"{error}; step {position.step} is in memory only")

    def finish(self, position: Position) -> None:
        """Commit `position` durably and return when it is safe; all ranks together. Raises like `after_step`."""
        self._finish(position, retries=None)

    def _finish(self, position: Position, *, retries: int | None) -> None:
        """Commit `position` durably; `retries`: failed saves of it that are repeated, None: as the policy allows."""
        tier = self._tier()
        started = 0
        while True:
            try:
                tier.wait()
                self._observe_saves()
                missing = Save.STATE if tier.committed_step != position.step else Save.NOTHING
                if self._policy.crosses(position.tokens):
                    missing |= Save.MILESTONE
                if missing is Save.NOTHING:
                    return
                self._save(position, missing)
                started += 1
            except TooSlowError:
                raise
            except StorageError as error:
                self._report(self._policy.failed(error, tier.committed_step, self._clock()))
                if retries is not None and started > retries:
                    raise

    def close(self) -> None:
        """Stop the memory tier's thread; a durable save under way is left behind. May be called again."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def durable_step(self) -> int:
        """Newest step that this rank knows to be committed, -1 for none."""
        return NONE_YET if self._durable is None else self._durable.committed_step

    @property
    def buddy_step(self) -> int:
        """Newest step that the buddy of this rank's shard has, -1 for none."""
        step = None if self._memory is None else self._memory.buddy_step
        return NONE_YET if step is None else step

    # ---- internals --------------------------------------------------------------------------------------------------

    def _tier(self) -> DurableTier:
        if self._durable is None:
            raise RuntimeError("resume() comes first")
        return self._durable

    def _check_owner(self) -> None:
        self._lease.check()

    def _new_lease(self) -> CommitLease:
        owner = OwnerRecords(self._storage, self._start.job, self._config.take_over)
        return CommitLease(self._storage, owner, self._token, self._retry)

    def _open_group(self) -> None:
        """Create a gloo group for resume and background saves, and agree on the session id of this start."""
        session = [secrets.token_hex(6)]
        if self._mesh.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
            dist.broadcast_object_list(session, src=0, group=self._group)
        self._session = session[0]

    def _open_memory(self, key: ShardKey, layout: BufferLayout) -> MemoryTier | None:
        if self._memory_directory is None:
            return None
        try:
            return MemoryTier(
                self._memory_directory,
                key=key,
                layout=layout,
                generation=self._start.generation,
                session=self._session,
                config_digest=self._config_digest,
            )
        except OSError as error:
            sentence = (
                f"memory snapshots are off on rank {self._mesh.rank}: {self._memory_directory}: {error.strerror}: give "
                "the worker a memory volume that it can write, or set checkpoint.memory.everySteps to 0"
            )
            self.warnings.append(sentence)
            log.warning("%s", sentence)
            return None

    def _shard_key(self) -> ShardKey:
        mesh = self._mesh
        replicated = not mesh.dp_mode.is_sharded
        return ShardKey(
            mesh.tp_rank,
            mesh.tp_size,
            0 if replicated else mesh.dp_rank,
            1 if replicated else mesh.dp_size,
            mesh.pp_rank,
            mesh.pp_size,
        )

    def _adopt(self, outcome: ResumeOutcome, session: Session, token: FenceToken) -> None:
        agreed = outcome.agreed
        self._lease.claimed = agreed.fenced
        self.resumed_from = outcome.source
        self._keeps_snapshots = outcome.keeps_snapshots
        self._memory_is_safe = agreed.memory_is_safe
        self.warnings.extend(outcome.warnings)
        for sentence in outcome.warnings:
            if self._mesh.rank == 0:
                log.warning("%s", sentence)
        if agreed.position is not None:
            self._completed = agreed.position.step
            if outcome.source in (ResumeSource.MEMORY, ResumeSource.PEER):
                self.memory_step = agreed.position.step
        self._policy.started(max(agreed.durable_step, 0), self._clock())
        self._policy.milestone_tokens = agreed.milestone_tokens
        self._durable = DurableTier(
            session,
            token=token,
            ensure_lease=self._lease.ensure,
            known_bad=agreed.known_bad,
            after_milestone=self._after_milestone,
        )
        self._durable.committed_step = agreed.durable_step
        self._durable.milestone_tokens = agreed.milestone_tokens
        if self._mesh.rank == 0:
            RecordCopies(self._config, self._storage).fetch()
        self._durable.prepare(list(outcome.leftovers))

    def _snapshot(self, position: Position) -> None:
        if self._memory is None or (not self._memory_is_safe and not self._keeps_snapshots):
            return
        if self._snapshot_step == position.step:
            return
        if self._keeps_snapshots:
            moment = Moment(position, self._start.generation, self._session)
            self._memory.stage(moment, self._state.local_tensors())
            self._record_finalized()
        else:
            # A neighbour keeps this shard: its previous snapshot was finalized before this step could complete.
            self.memory_step = max(self.memory_step, self._snapshot_step)
        self._snapshot_step = position.step

    def _record_finalized(self) -> None:
        memory = self._memory
        if memory is None:
            return
        if memory.finalized_step is not None:
            self.memory_step = memory.finalized_step
        self.warnings += memory.warnings[self._memory_warnings :]
        self._memory_warnings = len(memory.warnings)

    def _save(self, position: Position, what: Save) -> None:
        if Save.STATE in what:
            self._policy.started(position.step, self._clock())
        self._tier().start(position, what)

    def _observe_saves(self) -> None:
        """Record how the newest save ended, if it did."""
        tier = self._tier()
        try:
            tier.poll()
        except TooSlowError:
            raise
        except StorageError as error:
            self._report(self._policy.failed(error, tier.committed_step, self._clock()))
        if tier.saves != self._saves:
            self._saves = tier.saves
            self._policy.milestone_tokens = tier.milestone_tokens
            if self._policy.ended():
                self._report(f"saving works again: step {tier.committed_step} is committed")

    def _report(self, sentence: str) -> None:
        """Add a warning on the first rank; the others have seen the same."""
        if self._mesh.rank == 0:
            self.warnings.append(sentence)
