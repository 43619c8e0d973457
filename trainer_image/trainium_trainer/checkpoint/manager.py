"""When the training state is saved, and what the loop calls: the policy over memory tier and durable tier.

Order of a step: `before_update`, the step's own all-reduce (which also sums `vote`), the optimizer step, `after_step`.

Invariants: all ranks start a durable save at the same step, because they act on the same sum of votes; a save that is
due while one is under way is skipped, never queued; the training thread copies memory and nothing else: hashing,
writing, talking and committing happen elsewhere.
"""

from __future__ import annotations

import logging
import secrets
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch.distributed as dist

from trainium_contract.trainer import CheckpointConfig, DataParallelMode
from trainium_trainer.checkpoint import durable
from trainium_trainer.checkpoint.agreement import Moment, ShardKey
from trainium_trainer.checkpoint.commit import FenceToken
from trainium_trainer.checkpoint.durable import DurableTier
from trainium_trainer.checkpoint.interfaces import Position, ResumeSource
from trainium_trainer.checkpoint.layout import Layout
from trainium_trainer.checkpoint.memory import MemoryTier
from trainium_trainer.checkpoint.resume import Outcome, Resumption
from trainium_trainer.checkpoint.storage import PosixStorage, Retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.interfaces import Mesh, TrainingState
    from trainium_trainer.checkpoint.storage import Storage

log = logging.getLogger(__name__)

NONE_YET = -1
_GROUP_TIMEOUT = timedelta(hours=2)
"""Ranks that have written wait this long for the slowest; a lost peer is noticed at once, by its connection."""
_BUSY = -2.0
"""Outweighs the one vote for a save."""


class CheckpointManager:
    """Checkpoints of one rank; every method is called from the training thread.

    `memory_step`, `durable_step`: newest safe step of each tier, -1 for none. `resumed_from`: where the state came
    from. `warnings`: sentences about what was damaged or is switched off.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        state: TrainingState,
        mesh: Mesh,
        generation: int,
        memory_directory: Path | None,
        config_digest: str,
        run: str = "",
        storage: Storage | None = None,
        retry: Retry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._state = state
        self._mesh = mesh
        self._generation = generation
        self._config_digest = config_digest
        self._run = run
        self._storage = storage if storage is not None else PosixStorage(Path(config.path))
        self._retry = retry if retry is not None else Retry()
        self._clock = clock
        self._memory_directory = memory_directory if config.memory.every_steps else None
        self._memory: MemoryTier | None = None
        self._durable: DurableTier | None = None
        self._group: ProcessGroup | None = None
        self._session = ""
        self._keeps_snapshots = False
        self._memory_is_safe = False
        self._completed = 0
        self._snapshot_step = NONE_YET
        self._saved_step = 0
        self._saved_at = 0.0
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
        layout = Layout.of(self._state.local_tensors())
        self._memory = self._open_memory(key, layout)
        token = FenceToken(self._generation, self._run, self._session)
        outcome = Resumption(
            state=self._state,
            mesh=self._mesh,
            key=key,
            layout=layout,
            memory=self._memory,
            storage=self._storage,
            group=self._group,
            token=token,
            config_digest=self._config_digest,
            retry=self._retry,
        ).run()
        self._adopt(outcome, token)
        return outcome.position

    # ---- in a step --------------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Before the last collective of a step: wait (normally for nothing) until the previous snapshot is sealed.

        The completion of a step on any rank then implies that every rank has the state before it.
        """
        if self._memory is not None:
            self._memory.settle()
            self._note_sealed()

    def vote(self) -> float:
        """This rank's word on a durable save after the step under way, to be summed in the step's own all-reduce."""
        tier = self._tier()
        due = self._mesh.rank == 0 and self._is_due(self._completed + 1)
        return (1.0 if due else 0.0) + (_BUSY if tier.busy else 0.0)

    def after_step(self, position: Position, votes: float) -> None:
        """After the optimizer step: snapshot to memory, start a durable save when `votes` (the sum) says so.

        Raises StorageError or StaleGenerationError when an earlier save or snapshot failed.
        """
        tier = self._tier()
        tier.poll()
        self._completed = position.step
        every = self._config.memory.every_steps
        if every and position.step % every == 0:
            self._snapshot(position)
        if votes > 0.5:
            self._save(position)

    # ---- end --------------------------------------------------------------------------------------------------------

    def yield_(self, position: Position, *, memory_ends: bool = False) -> None:
        """Make `position` safe before leaving on request; all ranks together.

        In memory where that is enough; durable when a rank has no memory tier or loses it (`memory_ends`), or when the
        state is sharded over the data-parallel ranks, because the next membership will hardly have the same shards.
        """
        self._snapshot(position)
        self.before_update()
        if memory_ends or not self._memory_is_safe or self._mesh.dp_mode is DataParallelMode.FULLY_SHARDED:
            self.finish(position)

    def finish(self, position: Position) -> None:
        """Commit `position` durably and return when it is safe; all ranks together."""
        tier = self._tier()
        tier.wait()
        if tier.committed_step != position.step:
            self._save(position)
            tier.wait()

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

    # ---- internals --------------------------------------------------------------------------------------------------

    def _tier(self) -> DurableTier:
        if self._durable is None:
            raise RuntimeError("resume() comes first")
        return self._durable

    def _open_group(self) -> None:
        """A gloo group of our own for resume and background saves, and the session id of this start."""
        session = [secrets.token_hex(6)]
        if self._mesh.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
            dist.broadcast_object_list(session, src=0, group=self._group)
        self._session = session[0]

    def _open_memory(self, key: ShardKey, layout: Layout) -> MemoryTier | None:
        if self._memory_directory is None:
            return None
        try:
            return MemoryTier(
                self._memory_directory,
                key=key,
                layout=layout,
                generation=self._generation,
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
        if mesh.dp_mode is DataParallelMode.REPLICATED:
            return ShardKey(mesh.tp_rank, mesh.tp_size)
        return ShardKey(mesh.tp_rank, mesh.tp_size, mesh.dp_rank, mesh.dp_size)

    def _adopt(self, outcome: Outcome, token: FenceToken) -> None:
        self.resumed_from = outcome.source
        self._keeps_snapshots = outcome.keeps_snapshots
        self._memory_is_safe = outcome.memory_is_safe
        self.warnings.extend(outcome.warnings)
        for sentence in outcome.warnings:
            if self._mesh.rank == 0:
                log.warning("%s", sentence)
        if outcome.position is not None:
            self._completed = outcome.position.step
            if outcome.source in (ResumeSource.MEMORY, ResumeSource.PEER):
                self.memory_step = outcome.position.step
        self._saved_step = max(outcome.durable_step, 0)
        self._saved_at = self._clock()
        self._durable = DurableTier(
            self._storage,
            state=self._state,
            mesh=self._mesh,
            group=self._group,
            token=token,
            config_digest=self._config_digest,
            keep_last=self._config.durable.keep_last,
            known_bad=outcome.known_bad,
            retry=self._retry,
        )
        self._durable.committed_step = outcome.durable_step
        self._durable.prepare(list(outcome.leftovers))

    def _is_due(self, step: int) -> bool:
        every = self._config.durable
        if every.every_steps is not None and step - self._saved_step >= every.every_steps:
            return True
        return every.every_seconds is not None and self._clock() - self._saved_at >= every.every_seconds

    def _snapshot(self, position: Position) -> None:
        if self._memory is None or (not self._memory_is_safe and not self._keeps_snapshots):
            return
        if self._snapshot_step == position.step:
            return
        if self._keeps_snapshots:
            moment = Moment(position, self._generation, self._session)
            self._memory.stage(moment, self._state.local_tensors())
            self._note_sealed()
        else:
            # A neighbour keeps this shard: its previous snapshot was sealed before this step could complete.
            self.memory_step = max(self.memory_step, self._snapshot_step)
        self._snapshot_step = position.step

    def _note_sealed(self) -> None:
        if self._memory is not None and self._memory.sealed_step is not None:
            self.memory_step = self._memory.sealed_step

    def _save(self, position: Position) -> None:
        self._saved_step = position.step
        self._saved_at = self._clock()
        self._tier().start(position)


def warm() -> None:
    """Import everything that a start, a save and a restore need; no side effects."""
    durable.warm()
