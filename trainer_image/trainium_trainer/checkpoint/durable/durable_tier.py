"""The durable tier: decides when a save is due, and runs one asynchronous sharded save at a time.

`start` copies the state, which is the only cost in the step, and passes it to a thread, which writes this rank's file.
Sizes and digests travel to rank 0 over a separate process group; its save thread then commits. The
thread is a daemon, so that a store that hangs cannot keep a process from leaving.

Guarantees:
- Only rank 0's policy decides what is saved, by its vote. Every rank counts failures, so that all ranks end the
  run at the same failure.
- A failed save is retried soon, whatever the interval, but never immediately.
- No collective runs on the training thread.
- All ranks get the same outcome.
- A save that fails is raised as StorageError or StaleGenerationError at the next `poll`.
- A failed save leaves no folder, unless it may be committed, for instance when a peer failed before the outcome reached
  it.
- No rank waits for a store beyond the time limit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from enum import Flag, auto
from typing import TYPE_CHECKING, TypeAlias

from trainium_contract.wire.checkpoint_manifest import CheckpointKind, Manifest, folder_name, milestone_name
from trainium_contract.worker_process.write_access import FULL
from trainium_trainer.checkpoint.collectives import reduce_on_root
from trainium_trainer.checkpoint.errors import TooSlowError, explain_failure
from trainium_trainer.checkpoint.format.live_state import SavePlan, StagingBuffers, flatten, is_weight, plan_saves
from trainium_trainer.checkpoint.format.writer import (
    DigestReport,
    fold_reports,
    write_digests,
    write_shard,
    write_tables,
)
from trainium_trainer.checkpoint.root.commit import prepare_commit, publish
from trainium_trainer.checkpoint.root.metrics_copy import RecordCopies
from trainium_trainer.checkpoint.root.survey import prune, remove_attempts
from trainium_trainer.storage.errors import StorageError, is_transient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from trainium_contract.trainer.checkpoint import DurableTierConfig, Milestones
    from trainium_trainer.checkpoint.interfaces import Position, Session
    from trainium_trainer.checkpoint.root.commit_lease import CommitLease

AfterMilestone: TypeAlias = "Callable[[int, ProcessGroup | None, Callable[[], None]], None]"
"""Called on every rank in the background after the commit of a milestone, with its step, the process group of the
saves, which is free then, and a callback that reports progress.
"""


RETRY_SECONDS = 60.0
"""The time from a failed save to its retry, unless the interval is shorter."""


class Save(Flag):
    """The saves that follow a step."""

    NOTHING = 0
    STATE = auto()
    """A checkpoint from which training can resume."""
    MILESTONE = auto()
    """The weights only."""


_BUSY = 4
"""Greater than every value of Save, so that the sum encodes both the wanted saves and the number of busy ranks."""


def encode_vote(wanted: Save, *, busy: bool) -> int:
    """Return the vote of one rank, to be summed over the ranks; only rank 0 wants a save."""
    return wanted.value + _BUSY * busy


def decode_votes(votes: int) -> Save:
    """Return the saves decided by the sum of the votes; none while any rank is busy."""
    busy, wanted = divmod(votes, _BUSY)
    return Save.NOTHING if busy else Save(wanted)


@dataclass(slots=True)
class SavePolicy:
    """Tracks the saves and failures of one rank; times are seconds of the caller's clock."""

    durable: DurableTierConfig
    milestones: Milestones
    saved_step: int = 0
    """Step of the newest save that was started, or resumed from."""
    saved_at: float = 0.0
    milestone_tokens: int = 0
    """The position, in tokens, of the newest milestone."""
    failures: int = 0
    """The number of consecutive failed saves."""

    def propose_saves(self, *, step: int, now: float) -> Save:
        """Return what may be saved after `step`; `has_reached_milestone` then decides about the milestone."""
        if self.failures and now - self.saved_at < min(RETRY_SECONDS, self.durable.every_seconds or RETRY_SECONDS):
            return Save.NOTHING
        state = Save.STATE if self.failures or self._is_interval_over(step, now) else Save.NOTHING
        return state | (Save.NOTHING if self.milestones.every_tokens is None else Save.MILESTONE)

    def has_reached_milestone(self, tokens: int) -> bool:
        """Return whether a milestone lies between the newest one and this position."""
        every = self.milestones.every_tokens
        return every is not None and tokens // every > self.milestone_tokens // every

    def record_start(self, step: int, now: float) -> None:
        """Record that a save starts."""
        self.saved_step, self.saved_at = step, now

    def record_success(self) -> int:
        """Record a successful save; return the number of failed saves before it."""
        failures, self.failures = self.failures, 0
        return failures

    def record_failure(self, error: StorageError, newest: int, now: float) -> str:
        """Count a failure; return the message to report while training continues, the store's error first.

        Raises StorageError when too many consecutive saves have failed.
        """
        self.failures += 1
        self.saved_at = now
        safe = f"the newest durable checkpoint is step {newest}" if newest >= 0 else "there is no durable checkpoint"
        if self.failures > self.durable.failure_tolerance:
            more = f" ({self.failures} saves in a row have failed; {safe})" if self.failures > 1 else ""
            raise StorageError(f"{error}{more}") from error
        return f"{error}; training continues without this save (saves failed in a row: {self.failures}, {safe})"

    def _is_interval_over(self, step: int, now: float) -> bool:
        config = self.durable
        if config.every_steps is not None and step - self.saved_step >= config.every_steps:
            return True
        return config.every_seconds is not None and now - self.saved_at >= config.every_seconds


class DurableTier:
    """Saves of one rank; `start`, `poll` and `wait` are called from the training thread."""

    def __init__(
        self,
        session: Session,
        *,
        lease: CommitLease,
        committed_step: int,
        milestone_tokens: int,
        known_bad: frozenset[str],
        leftovers: Sequence[str],
        after_milestone: AfterMilestone | None = None,
    ) -> None:
        """Allocate the staging buffers, agree on the save plan, and remove `leftovers`, all in the background.

        lease: rank 0 claims it before a commit if the start could not. committed_step: the newest valid
        committed step, -1 for none. known_bad: the folders of damaged checkpoints.
        """
        self._state, self._mesh, self._group = session.state, session.mesh, session.group
        self._storage = session.storage
        self.stop_requested = threading.Event()
        """Set when the process has been asked to stop: from then on no retry waits for space on a full store."""
        self._sleep = session.retry.sleep
        self._retry = replace(session.retry, sleep=self._pause, is_retryable=self._is_worth_retrying)
        self._config, self._config_digest = session.config, session.config_digest
        self._settings = dict(session.settings)
        self._lease, self._token = lease, lease.token
        self._known_bad = known_bad
        self._after_milestone = after_milestone
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging: StagingBuffers | None = None
        self._plans: dict[CheckpointKind, SavePlan] = {}
        self._started_at = 0.0
        self._published = ""
        """The attempt whose receipt this rank is publishing or published last."""
        self.successful_saves = 0
        """The number of saves that have succeeded."""
        self.committed_step = committed_step
        """The newest committed step that this rank knows."""
        self.milestone_tokens = milestone_tokens
        """The position, in tokens, of the newest milestone that this rank knows."""
        self._run(lambda: self._prepare(leftovers), "prepare")

    @property
    def busy(self) -> bool:
        """Whether a save (or the preparation) is in progress on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, position: Position, saves: Save) -> None:
        """Copy the state as of `position` and save it in the background; waits for an earlier save of this rank."""
        self.wait()
        live = flatten(self._state.state_dict())
        assert self._staging is not None, "the preparation has ended"
        tensors = self._staging.fill(live, is_weight if Save.STATE not in saves else lambda _: True)
        self._run(lambda: self._save(position, tensors, saves), f"save-{position.step}")

    def poll(self) -> None:
        """Raise the error of the background thread, once; raise TooSlowError for a save that exceeds the time limit."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self.busy and self._compute_seconds_left() <= 0:
            raise self._create_timeout_error()

    def wait(self) -> None:
        """Wait until no save is in progress; raises like `poll`."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._compute_seconds_left()))
            if self._thread.is_alive():
                raise self._create_timeout_error()
            self._thread = None
        self.poll()

    def _pause(self, seconds: float) -> None:
        """Sleep; end the sleep early when the process is asked to stop."""
        if self.stop_requested.is_set() or self._sleep is not time.sleep:
            self._sleep(seconds)
        else:
            self.stop_requested.wait(seconds)

    def _is_worth_retrying(self, error: OSError) -> bool:
        # A full store does not get space within the seconds that a stopping process has.
        return is_transient(error) and not (self.stop_requested.is_set() and error.errno in FULL)

    def _compute_seconds_left(self) -> float:
        return self._started_at + self._config.durable.save_timeout_seconds - time.monotonic()

    def _create_timeout_error(self) -> TooSlowError:
        limit = self._config.durable.save_timeout_seconds
        newest = f"step {self.committed_step}" if self.committed_step >= 0 else "none"
        return TooSlowError(
            f"checkpoint storage {self._storage.location}: a save has not ended after {limit} s (newest durable "
            f"checkpoint: {newest}): look at the store, or raise checkpoint.durable.saveTimeoutSeconds"
        )

    # ---- on the background thread -----------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is raised on the training thread
                self._error = explain_failure(error, self._storage.location)

        self._started_at = time.monotonic()
        self._thread = threading.Thread(target=guarded, name=f"checkpoint-{name}", daemon=True)
        self._thread.start()

    def _prepare(self, leftovers: Sequence[str]) -> None:
        live = flatten(self._state.state_dict())
        self._staging = StagingBuffers(live)
        self._plans = plan_saves(live, self._mesh, self._group)
        if self._mesh.rank == 0:
            with contextlib.suppress(OSError):  # leftovers are no reason to stop training
                remove_attempts(self._storage, leftovers)

    def _save(self, position: Position, tensors: dict[str, torch.Tensor], saves: Save) -> None:
        if Save.STATE in saves:
            self._write(position, tensors, folder_name(position.step), CheckpointKind.STATE)
            self.committed_step = position.step
            if self._mesh.rank == 0:
                with contextlib.suppress(OSError):  # an extra old checkpoint is no reason to stop training
                    prune(self._storage, self._config.durable.keep_last, self._known_bad, position.step)
        if Save.MILESTONE in saves:
            self._write(position, tensors, milestone_name(position.step), CheckpointKind.WEIGHTS)
            self.milestone_tokens = position.tokens
            if self._after_milestone is not None:
                self._extend_time_limit()
                self._after_milestone(position.step, self._group, self._extend_time_limit)
        self.successful_saves += 1
        if self._mesh.rank == 0:
            RecordCopies(self._config, self._storage).send()

    def _extend_time_limit(self) -> None:
        """Restart the time limit: the work after a milestone may take longer than a save, but must make progress."""
        self._started_at = time.monotonic()

    def _write(self, position: Position, tensors: dict[str, torch.Tensor], folder: str, kind: CheckpointKind) -> None:
        attempt, plan = f"{folder}/{self._token.attempt}", self._plans[kind]

        def write() -> DigestReport:
            file = write_shard(
                self._storage, attempt, plan.file_index, plan.items, lambda item: tensors[item.name], self._retry
            )
            return DigestReport.of(self._mesh.rank, plan.file_index, file)

        def fold(reports: list[DigestReport]) -> list[DigestReport]:
            return fold_reports(reports, lambda new, old: write_digests(self._storage, attempt, new, old, self._retry))

        try:
            reduce_on_root(
                write, lambda reports: self._commit(position, folder, kind, reports), self._group, attempt, fold
            )
        except BaseException:
            if self._mesh.rank == 0 and self._published != attempt:
                with contextlib.suppress(OSError):
                    remove_attempts(self._storage, [attempt])
            raise

    def _commit(self, position: Position, folder: str, kind: CheckpointKind, reports: list[DigestReport]) -> None:
        """Write the tables and commit, on rank 0, after the last write of all ranks."""
        attempt, whole = f"{folder}/{self._token.attempt}", self._plans[kind].whole
        assert whole is not None, "rank 0 has the layout of all"
        self._lease.ensure()
        written = {index: file for report in reports for index, file in report.files}
        tables = [table for report in reports for table in report.tables]
        files = write_tables(self._storage, attempt, whole, written, self._retry, tables)
        manifest = Manifest(
            kind=kind,
            step=position.step,
            samples=position.samples,
            tokens=position.tokens,
            generation=self._token.generation,
            world_size=self._mesh.world_size,
            data_parallel=self._mesh.dp_size,
            tensor_parallel=self._mesh.tp_size,
            pipeline_parallel=self._mesh.pp_size,
            config_digest=self._config_digest,
            settings=self._settings,
            created=time.time(),
            files=tuple(files),
        )
        receipt = prepare_commit(self._storage, folder, manifest, self._token, self._retry)
        self._published = attempt
        publish(self._storage, receipt, self._retry, damaged=folder in self._known_bad)
