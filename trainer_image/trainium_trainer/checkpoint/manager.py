"""The checkpoint manager that the training loop calls: the policy over memory tier and durable tier.

Order of a step: `finish_snapshot`, the step's own all-reduce (which also sums `vote`), the optimizer step, `save_step`.

Guarantees:
- All ranks start a durable save at the same step, because they act on the same sum of votes.
- A save that is due while another is in progress is skipped, never queued.
- The training thread only copies memory: other threads hash, write, communicate and commit.
"""

from __future__ import annotations

import logging
import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from trainium_trainer.checkpoint.durable.durable_tier import (
    AfterMilestone,
    DurableTier,
    Save,
    SavePolicy,
    decode_votes,
    encode_vote,
)
from trainium_trainer.checkpoint.interfaces import MeshCoordinates, Position, ResumeSource, Session, TrainingState
from trainium_trainer.checkpoint.memory.layout import BufferLayout, format_shard_name
from trainium_trainer.checkpoint.memory.memory_tier import MemoryTier
from trainium_trainer.checkpoint.resume.resume import ResumeOutcome, Resumption
from trainium_trainer.checkpoint.root.commit import FenceToken
from trainium_trainer.checkpoint.root.commit_lease import CommitLease, OwnershipCheck, hash_settings
from trainium_trainer.checkpoint.root.owner import OwnerRecords, RunStart
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.protocol import Retry, Storage
from trainium_worker.snapshots.files import Version
from trainium_worker.snapshots.store import run_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from trainium_contract.trainer.checkpoint import CheckpointConfig

log = logging.getLogger(__name__)

NONE_YET = -1
_GROUP_TIMEOUT = timedelta(hours=2)
"""The time that ranks which have written wait for the slowest; a failed peer is detected at once by its connection."""


class CheckpointManager:
    """Checkpoints of one rank; every method is called from the training thread.

    `settings`: the JSON values, by name, that must not change between the runs of one history. `memory_step`,
    `durable_step`: the newest safe step of each tier, -1 for none; `buddy_step`: the step of another node's copy of
    this rank's shard, -1 without a copy. `resumed_from`: the source of the state. `warnings`: messages about damaged or
    disabled parts.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        state: TrainingState,
        mesh: MeshCoordinates,
        start: RunStart,
        memory_directory: Path | None,
        settings: Mapping[str, Any],
        after_milestone: AfterMilestone | None = None,
        storage: Storage | None = None,
        retry: Retry | None = None,
    ) -> None:
        """`storage`: None for what the configured path names."""
        self._config = config
        self._state = state
        self._mesh = mesh
        self._start = start
        self._settings = settings
        self._config_digest = hash_settings(settings)
        self._storage = open_storage(config.path) if storage is None else storage
        self._retry = Retry() if retry is None else retry
        self._clock = time.monotonic
        self._after_milestone = after_milestone
        self._memory_directory: Path | None = None
        if memory_directory is not None and config.memory.every_steps:
            self._memory_directory = run_directory(memory_directory, start.name or self._storage.location)
        self._memory: MemoryTier | None = None
        self._durable: DurableTier | None = None
        self._ownership_check: OwnershipCheck | None = None
        self._group: ProcessGroup | None = None
        self._session_id = ""
        self._writes_snapshots = False
        self._memory_is_safe = False
        self._completed_step = 0
        self._snapshot_step = NONE_YET
        self._policy = SavePolicy(config.durable, config.milestones)
        self._observed_saves = 0
        self.memory_step = NONE_YET
        self.resumed_from = ResumeSource.FRESH
        self.warnings: list[str] = []

    # ---- start ------------------------------------------------------------------------------------------------------

    def resume(self) -> Position | None:
        """Restore the newest state that all ranks can load; None when there is none. Collective, called once.

        Raises StorageError if the durable root cannot be used, StaleGenerationError if a newer start of the run owns
        it, and UnusableCheckpointError if the checkpoints cannot be continued and a user must decide.
        """
        self._open_group()
        key = self._format_shard_name()
        layout = BufferLayout.of(self._state.list_local_tensors(), self._config_digest)
        self._memory = self._open_memory(key, layout)
        token = FenceToken(self._start.generation, self._start.name, self._session_id)
        owner = OwnerRecords(self._storage, self._start.job, self._config.take_over)
        lease = CommitLease(self._storage, owner, token, self._retry)
        self._ownership_check = OwnershipCheck(lease.check)
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
        outcome = Resumption(session, key=key, layout=layout, memory=self._memory, lease=lease).run()
        self._apply_outcome(outcome, session, token, lease)
        if self._memory is not None:
            self._memory.take_warnings()  # they are reported with the outcome
        return outcome.agreed.position

    # ---- in a step --------------------------------------------------------------------------------------------------

    def finish_snapshot(self) -> None:
        """Wait until the previous snapshot is finalized, which is normally the case; called before the last collective.

        The completion of a step on any rank then implies that every rank has the snapshot of the step before.
        """
        if self._memory is not None:
            self._memory.wait_for_snapshot()
            self._record_finalized()

    def vote(self) -> int:
        """Return this rank's vote on a durable save after the current step, to be summed in the step's all-reduce."""
        tier = self._require_durable_tier()
        wanted = Save.NOTHING
        if self._mesh.rank == 0:
            wanted = self._policy.propose_saves(step=self._completed_step + 1, now=self._clock())
        return encode_vote(wanted, busy=tier.busy)

    def check_owner(self, since: float) -> None:
        """Raise StaleGenerationError if the run continued without this rank; called before a step is recorded.

        `since` is a time (`time.monotonic`) after which its peers still needed it for the step. The store is queried
        only when the step took clearly longer than those before it, see `OwnershipCheck`.
        """
        if self._ownership_check is not None:
            self._ownership_check.confirm(since)

    def save_step(self, position: Position, votes: int) -> None:
        """Take a snapshot in memory after the update, and start a durable save if the sum of `votes` decides it.

        A failed save is reported in `warnings`. Raises StorageError when too many consecutive saves have failed or a
        snapshot cannot be written, TooSlowError when a save does not end, StaleGenerationError when another start owns
        the root.
        """
        self._observe_saves()
        self._completed_step = position.step
        every = self._config.memory.every_steps
        if every and position.step % every == 0:
            self._take_snapshot(position)
        saves = decode_votes(votes)
        if not self._policy.has_reached_milestone(position.tokens):
            saves &= ~Save.MILESTONE
        if saves is not Save.NOTHING:
            self._save(position, saves)

    # ---- end --------------------------------------------------------------------------------------------------------

    def save_before_exit(self, position: Position, *, memory_ends: bool = False) -> None:
        """Save `position` before a requested exit. Collective.

        The snapshot in memory is enough unless a rank has no memory tier or loses it (`memory_ends`), or the state is
        sharded over the data-parallel ranks, because the next membership will rarely have the same shards.
        """
        self._take_snapshot(position)
        self.finish_snapshot()
        is_in_memory = self._memory_is_safe and not memory_ends
        if is_in_memory and not self._mesh.dp_mode.is_sharded:
            return
        self._require_durable_tier().stop_requested.set()
        try:
            self.finish(position, retries=0)
        except StorageError as error:
            if not is_in_memory:
                raise
            self._report(f"{error}; step {position.step} is in memory only")

    def finish(self, position: Position, *, retries: int | None = None) -> None:
        """Commit `position` durably and return when it is safe. Collective. Raises like `save_step`.

        `retries` limits the retries of failed saves; None: as the policy allows.
        """
        tier = self._require_durable_tier()
        started = 0
        while True:
            try:
                tier.wait()
                self._observe_saves()
                missing = Save.STATE if tier.committed_step != position.step else Save.NOTHING
                if self._policy.has_reached_milestone(position.tokens):
                    missing |= Save.MILESTONE
                if missing is Save.NOTHING:
                    return
                self._save(position, missing)
                started += 1
            except StorageError as error:
                self._report(self._policy.record_failure(error, tier.committed_step, self._clock()))
                if retries is not None and started > retries:
                    raise

    def close(self) -> None:
        """Stop the memory tier's thread and abandon a durable save in progress. May be called again."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def durable_step(self) -> int:
        """The newest committed step that this rank knows, -1 for none."""
        return NONE_YET if self._durable is None else self._durable.committed_step

    @property
    def buddy_step(self) -> int:
        """The newest step that the buddy of this rank's shard has, -1 for none."""
        step = None if self._memory is None else self._memory.buddy_step
        return NONE_YET if step is None else step

    # ---- internals --------------------------------------------------------------------------------------------------

    def _require_durable_tier(self) -> DurableTier:
        if self._durable is None:
            raise RuntimeError("resume() comes first")
        return self._durable

    def _open_group(self) -> None:
        """Create a gloo group for resume and background saves, and agree on the session id of this start."""
        session_id = [secrets.token_hex(6)]
        if self._mesh.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
            dist.broadcast_object_list(session_id, src=0, group=self._group)
        self._session_id = session_id[0]

    def _open_memory(self, key: str, layout: BufferLayout) -> MemoryTier | None:
        if self._memory_directory is None:
            return None
        try:
            return MemoryTier(self._memory_directory, name=key, layout=layout, generation=self._start.generation)
        except OSError as error:
            warning = (
                f"memory snapshots are off on rank {self._mesh.rank}: {self._memory_directory}: {error.strerror}: give "
                "the worker a memory volume that it can write, or set checkpoint.memory.everySteps to 0"
            )
            self.warnings.append(warning)
            log.warning("%s", warning)
            return None

    def _format_shard_name(self) -> str:
        mesh = self._mesh
        data = (mesh.dp_rank, mesh.dp_size) if mesh.dp_mode.is_sharded else (0, 1)
        return format_shard_name(mesh.tp_rank, mesh.tp_size, *data, mesh.pp_rank, mesh.pp_size)

    def _apply_outcome(self, outcome: ResumeOutcome, session: Session, token: FenceToken, lease: CommitLease) -> None:
        agreed = outcome.agreed
        lease.claimed = agreed.holds_fence
        self.resumed_from = outcome.source
        self._writes_snapshots = outcome.writes_snapshots
        self._memory_is_safe = agreed.memory_is_safe
        self.warnings.extend(outcome.warnings)
        for warning in outcome.warnings:
            if self._mesh.rank == 0:
                log.warning("%s", warning)
        if agreed.position is not None:
            self._completed_step = agreed.position.step
            if outcome.source in (ResumeSource.MEMORY, ResumeSource.PEER):
                self.memory_step = agreed.position.step
        self._policy.record_start(max(agreed.durable_step, 0), self._clock())
        self._policy.milestone_tokens = agreed.milestone_tokens
        self._durable = DurableTier(
            session,
            token=token,
            ensure_lease=lease.ensure,
            known_bad=agreed.known_bad,
            after_milestone=self._after_milestone,
        )
        self._durable.committed_step = agreed.durable_step
        self._durable.milestone_tokens = agreed.milestone_tokens
        self._durable.prepare(list(outcome.leftovers))

    def _take_snapshot(self, position: Position) -> None:
        if self._memory is None or (not self._memory_is_safe and not self._writes_snapshots):
            return
        if self._snapshot_step == position.step:
            return
        if self._writes_snapshots:
            version = Version(position.step, self._start.generation, self._session_id, position.encode())
            self._memory.stage(version, self._state.list_local_tensors())
            self._record_finalized()
        else:
            # Another rank writes this shard: its previous snapshot was finalized before this step could complete.
            self.memory_step = max(self.memory_step, self._snapshot_step)
        self._snapshot_step = position.step

    def _record_finalized(self) -> None:
        memory = self._memory
        if memory is None:
            return
        if memory.finalized_step is not None:
            self.memory_step = memory.finalized_step
        self.warnings += memory.take_warnings()

    def _save(self, position: Position, saves: Save) -> None:
        if Save.STATE in saves:
            self._policy.record_start(position.step, self._clock())
        self._require_durable_tier().start(position, saves)

    def _observe_saves(self) -> None:
        """Record the outcome of the newest save, if it has ended."""
        tier = self._require_durable_tier()
        try:
            tier.poll()
        except StorageError as error:
            self._report(self._policy.record_failure(error, tier.committed_step, self._clock()))
        if tier.successful_saves != self._observed_saves:
            self._observed_saves = tier.successful_saves
            self._policy.milestone_tokens = tier.milestone_tokens
            if self._policy.record_success():
                self._report(f"saving works again: step {tier.committed_step} is committed")

    def _report(self, warning: str) -> None:
        """Add a warning on the first rank; the other ranks have the same warning."""
        if self._mesh.rank == 0:
            self.warnings.append(warning)
