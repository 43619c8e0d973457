"""The checkpoint manager that the training loop calls: the policy over memory tier and durable tier.

Order of a step: `finish_snapshot`, the step's own all-reduce (which also sums `vote`), the optimizer step, `save_step`.

Guarantees:
- All ranks start a durable save at the same step, because they act on the same sum of votes.
- A save that is due while another is in progress is skipped, never queued.
- The training thread only copies memory: other threads hash, write, communicate and commit.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

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
from trainium_trainer.checkpoint.resume.resume import Resumption
from trainium_trainer.checkpoint.root.commit import FenceToken
from trainium_trainer.checkpoint.root.commit_lease import CommitLease
from trainium_trainer.checkpoint.root.owner import OwnerRecords, RunStart
from trainium_trainer.checkpoint.root.ownership_check import OwnershipCheck
from trainium_trainer.checkpoint.root.run_settings import hash_settings
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

NONE_YET = -1
_GROUP_TIMEOUT = timedelta(hours=2)
"""The time that ranks which have written wait for the slowest; a failed peer is detected at once by its connection."""


class CheckpointManager:
    """Checkpoints of one rank; every method is called from the training thread.

    `position`: the position of the state that was restored; None if there was none. `resumed_from`: its source.
    `memory_step`, `durable_step`: the newest safe step of each tier, -1 for none. `warnings`: messages about damaged or
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
        """Restore the newest state that all ranks can load. Collective.

        settings: the JSON values, by name, that must not change between the runs of one history. storage: None for
        what the configured path names.

        Raises StorageError if the durable root cannot be used, StaleGenerationError if a newer start of the run owns
        it, and UnusableCheckpointError if the checkpoints cannot be continued and a user must decide.
        """
        self._config, self._state, self._mesh, self._start = config, state, mesh, start
        self._clock = time.monotonic
        self._snapshot_step = NONE_YET
        self._observed_saves = 0
        self.memory_step = NONE_YET
        self.warnings: list[str] = []
        group, self._session_id = _open_group(mesh)
        session = Session(
            state=state,
            mesh=mesh,
            group=group,
            storage=open_storage(config.path) if storage is None else storage,
            retry=retry or Retry(),
            config=config,
            settings=settings,
            config_digest=hash_settings(settings),
        )
        key = _format_shard_name(mesh)
        layout = BufferLayout.of(state.list_local_tensors(), session.config_digest)
        self._memory: MemoryTier | None = None
        if memory_directory is not None and config.memory.every_steps:
            run = start.name or session.storage.location
            self._memory = self._open_memory(run_directory(memory_directory, run), key, layout)
        token = FenceToken(start.generation, start.name, self._session_id)
        owner = OwnerRecords(session.storage, start.job, config.take_over)
        lease = CommitLease(session.storage, owner, token, session.retry)
        self._ownership_check = OwnershipCheck(lease.check)
        outcome = Resumption(session, key=key, layout=layout, memory=self._memory, lease=lease).run()
        agreed = outcome.agreed
        lease.claimed = agreed.holds_fence
        self.position, self.resumed_from = agreed.position, outcome.source
        self._completed_step = 0 if agreed.position is None else agreed.position.step
        if outcome.source in (ResumeSource.MEMORY, ResumeSource.PEER):
            self.memory_step = self._completed_step
        self._writes_snapshots, self._memory_is_safe = outcome.writes_snapshots, agreed.memory_is_safe
        if self._memory is not None:
            self._memory.take_warnings()  # they are reported with the outcome
        self.warnings.extend(outcome.warnings)
        self._policy = SavePolicy(
            config.durable,
            config.milestones,
            saved_step=max(agreed.durable_step, 0),
            saved_at=self._clock(),
            milestone_tokens=agreed.milestone_tokens,
        )
        self._durable = DurableTier(
            session,
            lease=lease,
            committed_step=agreed.durable_step,
            milestone_tokens=agreed.milestone_tokens,
            known_bad=agreed.known_bad,
            leftovers=outcome.leftovers,
            after_milestone=after_milestone,
        )

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
        wanted = Save.NOTHING
        if self._mesh.rank == 0:
            wanted = self._policy.propose_saves(step=self._completed_step + 1, now=self._clock())
        return encode_vote(wanted, busy=self._durable.busy)

    def check_owner(self, since: float) -> None:
        """Raise StaleGenerationError if the run continued without this rank; called before a step is recorded.

        `since` is a time (`time.monotonic`) after which its peers still needed it for the step. The store is queried
        only when the step took clearly longer than those before it, see `OwnershipCheck`.
        """
        self._ownership_check.confirm(since)

    def save_step(self, position: Position, votes: int) -> None:
        """Take a snapshot in memory after the update, and start a durable save if the sum of `votes` decides it.

        A failed save is reported in `warnings`. Raises StorageError when too many consecutive saves have failed or a
        snapshot cannot be written, TooSlowError when a save does not end, StaleGenerationError when another start owns
        the root.
        """
        self._observe_saves()
        self._completed_step = position.step
        interval = self._config.memory.every_steps
        if interval and position.step % interval == 0:
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
        self._durable.stop_requested.set()
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
        tier = self._durable
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

    @property
    def durable_step(self) -> int:
        """The newest committed step that this rank knows, -1 for none."""
        return self._durable.committed_step

    # ---- internals --------------------------------------------------------------------------------------------------

    def _open_memory(self, directory: Path, key: str, layout: BufferLayout) -> MemoryTier | None:
        try:
            return MemoryTier(directory, name=key, layout=layout, generation=self._start.generation)
        except OSError as error:
            self.warnings.append(
                f"memory snapshots are off on rank {self._mesh.rank}: {directory}: {error.strerror}: give the worker a "
                "memory volume that it can write, or set checkpoint.memory.everySteps to 0"
            )
            return None

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
        self._durable.start(position, saves)

    def _observe_saves(self) -> None:
        """Record the outcome of the newest save, if it has ended."""
        tier = self._durable
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
        """Add a warning on rank 0; the other ranks have the same warning."""
        if self._mesh.rank == 0:
            self.warnings.append(warning)


def _open_group(mesh: MeshCoordinates) -> tuple[ProcessGroup | None, str]:
    """Create a gloo group for resume and background saves, and agree on the session id of this start. Collective."""
    session_id = [secrets.token_hex(6)]
    if mesh.world_size == 1:
        return None, session_id[0]
    group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
    dist.broadcast_object_list(session_id, src=0, group=group)
    return group, session_id[0]


def _format_shard_name(mesh: MeshCoordinates) -> str:
    data = (mesh.dp_rank, mesh.dp_size) if mesh.dp_mode.is_sharded else (0, 1)
    return format_shard_name(mesh.tp_rank, mesh.tp_size, *data, mesh.pp_rank, mesh.pp_size)
