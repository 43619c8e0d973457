"""The durable tier: one asynchronous sharded save at a time, committed the moment the last rank's write ends.

`start` copies the state, which is the only cost in the step, and passes it to a thread, which writes this rank's file.
Sizes and digests travel to the coordinator over a separate process group; the coordinator's thread then commits. The
ranks agree on who writes what before the first save (`save_plan`). The thread is a daemon, so that a store that hangs
cannot keep a process from leaving.

Guarantees:
- No collective runs on the training thread.
- Every rank gets the same outcome.
- A save that fails is raised as StorageError or StaleGenerationError at the next `poll`.
- A save that fails leaves no folder, unless it may be committed, for instance when a peer failed before the outcome
  reached it.
- Nobody waits for a store beyond the time limit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from trainium_agent.linux.write_access import FULL
from trainium_contract.wire.checkpoint_manifest import CheckpointKind, Manifest, folder_name, milestone_name
from trainium_trainer.checkpoint.collectives import reduce_on_root
from trainium_trainer.checkpoint.durable.save_plan import Planner, SavePlan
from trainium_trainer.checkpoint.durable.save_policy import Save
from trainium_trainer.checkpoint.errors import TooSlowError, explain_failure
from trainium_trainer.checkpoint.format.live_state import Staging, flatten
from trainium_trainer.checkpoint.format.shards import (
    DigestReport,
    fold_reports,
    write_digests,
    write_shard,
    write_tables,
)
from trainium_trainer.checkpoint.root.commit import FenceToken, prepare_commit, publish
from trainium_trainer.checkpoint.root.metrics_copy import RecordCopies
from trainium_trainer.checkpoint.root.survey import prune, remove_attempts
from trainium_trainer.models.state_dict import parameter_of
from trainium_trainer.storage.errors import is_transient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.interfaces import Position
    from trainium_trainer.checkpoint.session import Session

AfterMilestone: TypeAlias = "Callable[[int, ProcessGroup | None, Callable[[], None]], None]"
"""What every rank does in the background after a milestone was committed: called with its step, the group of the saves,
which is free then, and what is to be called now and then as a sign of life."""


class DurableTier:
    """Saves of one rank; `start`, `poll` and `wait` are called from the training thread."""

    def __init__(
        self,
        session: Session,
        *,
        token: FenceToken,
        ensure_lease: Callable[[], None],
        known_bad: frozenset[str],
        after_milestone: AfterMilestone | None = None,
    ) -> None:
        self._state, self._mesh, self._group = session.state, session.mesh, session.group
        self._storage = session.storage
        self.hurried = threading.Event()
        """Set when the process has been asked to leave: nothing waits for room on a full store any more."""
        self._sleep = session.retry.sleep
        self._retry = replace(session.retry, sleep=self._pause, is_worth_it=self._is_worth_retrying)
        self._config, self._config_digest = session.config, session.config_digest
        self._settings = dict(session.settings)
        self._token = token
        self._ensure_lease = ensure_lease
        """Called by the first rank before a commit: claims the fence where the start could not."""
        self._known_bad = known_bad
        self._after_milestone = after_milestone
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging: Staging | None = None
        self._planner: Planner | None = None
        self._plans: dict[CheckpointKind, SavePlan] = {}
        self._started = 0.0
        self._published = ""
        """Attempt whose receipt this rank is publishing, or has published last."""
        self.saves = 0
        """Saves that have succeeded."""
        self.committed_step = -1
        """Newest step that this rank knows to be committed."""
        self.milestone_tokens = 0
        """Position of the newest milestone that this rank knows of."""

    def prepare(self, leftovers: list[str]) -> None:
        """In the background: make the staging buffers, agree on who writes what, and remove what others left."""

        def work() -> None:
            live = flatten(self._state.state_dict())
            self._staging = Staging(live)
            self._plan(live)
            if self._mesh.rank == 0:
                with contextlib.suppress(OSError):  # leftovers are no reason to stop training
                    remove_attempts(self._storage, leftovers)

        self._run(work, "prepare")

    @property
    def busy(self) -> bool:
        """Whether a save (or the preparation) is under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, position: Position, what: Save) -> None:
        """Copy the state as of `position` and save it in the background; waits for an earlier save of this rank."""
        self.wait()
        live = flatten(self._state.state_dict())
        if self._staging is None or not self._staging.fits(live):
            self._staging, self._planner = Staging(live), None
        whole = Save.STATE in what
        tensors = self._staging.fill(live, lambda name: whole or is_weight(name))

        unplanned = live if self._planner is None else None

        def work() -> None:
            if unplanned is not None:
                self._plan(unplanned)
            self._save(position, tensors, what)

        self._run(work, f"save-{position.step}")

    def poll(self) -> None:
        """Raise what went wrong in the background, once; StorageError also for a save that takes too long."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self.busy and self._seconds_left() <= 0:
            raise self._too_slow()

    def wait(self) -> None:
        """Return when nothing is under way; raises like `poll`."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._seconds_left()))
            if self._thread.is_alive():
                raise self._too_slow()
            self._thread = None
        self.poll()

    def _pause(self, seconds: float) -> None:
        """Sleep, but end the pause that is under way when the process is asked to leave."""
        if self.hurried.is_set() or self._sleep is not time.sleep:
            self._sleep(seconds)
        else:
            self.hurried.wait(seconds)

    def _is_worth_retrying(self, error: OSError) -> bool:
        # A full store does not get room within the seconds that a leaving process has.
        return is_transient(error) and not (self.hurried.is_set() and error.errno in FULL)

    def _seconds_left(self) -> float:
        return self._started + self._config.durable.save_timeout_seconds - time.monotonic()

    def _too_slow(self) -> TooSlowError:
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

        self._started = time.monotonic()
        self._thread = threading.Thread(target=guarded, name=f"checkpoint-{name}", daemon=True)
        self._thread.start()

    def _plan(self, live: Mapping[str, Any]) -> None:
        """Agree with the other ranks on who writes what, for as long as the state keeps its layout. Collective."""
        self._planner = Planner(live, self._mesh, self._group)
        self._plans = {
            CheckpointKind.STATE: self._planner.plan(lambda _: True),
            CheckpointKind.WEIGHTS: self._planner.plan(is_weight),
        }

    def _save(self, position: Position, tensors: dict[str, torch.Tensor], what: Save) -> None:
        if Save.STATE in what:
            self._write(position, tensors, folder_name(position.step), CheckpointKind.STATE)
            self.committed_step = position.step
            if self._mesh.rank == 0:
                with contextlib.suppress(OSError):  # an old checkpoint too many is no reason to stop training
                    prune(self._storage, self._config.durable.keep_last, self._known_bad, position.step)
        if Save.MILESTONE in what:
            self._write(position, tensors, milestone_name(position.step), CheckpointKind.WEIGHTS)
            self.milestone_tokens = position.tokens
            if self._after_milestone is not None:
                self._alive()
                self._after_milestone(position.step, self._group, self._alive)
        self.saves += 1
        if self._mesh.rank == 0:
            RecordCopies(self._config, self._storage).send()

    def _alive(self) -> None:
        """Extend the time limit: what follows a milestone may take longer than a save, but has to make progress."""
        self._started = time.monotonic()

    def _write(self, position: Position, tensors: dict[str, torch.Tensor], folder: str, kind: CheckpointKind) -> None:
        attempt, plan = f"{folder}/{self._token.attempt}", self._plans[kind]

        def write() -> DigestReport:
            file = write_shard(
                self._storage, attempt, plan.place, plan.items, lambda item: tensors[item.name], self._retry
            )
            return DigestReport.of(self._mesh.rank, plan.place, file)

        def fold(reports: list[DigestReport]) -> list[DigestReport]:
            return fold_reports(reports, lambda new, old: write_digests(self._storage, attempt, new, old, self._retry))

        def commit(reports: list[DigestReport]) -> None:
            self._commit(position, folder, kind, reports)

        try:
            reduce_on_root(write, commit, self._group, attempt, fold)
        except BaseException:
            if self._mesh.rank == 0 and self._published != attempt:
                with contextlib.suppress(OSError):
                    remove_attempts(self._storage, [attempt])
            raise

    def _commit(self, position: Position, folder: str, kind: CheckpointKind, reports: list[DigestReport]) -> None:
        """On the coordinator, after the last rank's last write: the tables, then the commit."""
        attempt, whole = f"{folder}/{self._token.attempt}", self._plans[kind].whole
        assert whole is not None, "rank 0 has the scheme of all"
        self._ensure_lease()
        written = {place: file for each in reports for place, file in each.files}
        tables = [table for each in reports for table in each.tables]
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
        self._published = f"{folder}/{self._token.attempt}"
        publish(self._storage, receipt, self._retry, damaged=folder in self._known_bad)


def is_weight(name: str) -> bool:
    """Return whether a milestone has a tensor of this name."""
    return parameter_of(name) is not None
