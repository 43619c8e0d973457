"""The durable tier: one asynchronous sharded save at a time, committed when the last rank's write ends.

`start` copies the state, which is the only cost in the step, and passes it to a thread, which writes this rank's file.
Sizes and digests travel to the coordinator over a separate process group; the coordinator's thread then commits. The
thread is a daemon, so that a store that hangs cannot keep a process from leaving.

The ranks agree once per layout of the state on what each of them writes (`plan_saves`). Every rank derives its stage's
layout from its tensors. Rank 0 checks by digests that the ranks of a stage derived the same one. One rank of each stage
also sends the layout itself, for the index. Rank 0 returns the writers of the few tensors that several stages hold.

Guarantees:
- No collective runs on the training thread.
- All ranks get the same outcome.
- A save that fails is raised as StorageError or StaleGenerationError at the next `poll`.
- A failed save leaves no folder, unless it may be committed, for instance when a peer failed before the outcome reached
  it.
- No rank waits for a store beyond the time limit.
- Rank 0 receives a digest from each rank and a layout from each stage once, whatever the number of saves.
- A layout in which a value has no writer or several writers is refused before anything is written.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from trainium_agent.linux.write_access import FULL
from trainium_contract.wire.checkpoint_manifest import CheckpointKind, Manifest, folder_name, milestone_name
from trainium_trainer.checkpoint.collectives import reduce_on_root
from trainium_trainer.checkpoint.durable.save_policy import Save
from trainium_trainer.checkpoint.errors import TooSlowError, explain_failure
from trainium_trainer.checkpoint.format.live_state import StagingBuffers, build_layout, file_index, flatten
from trainium_trainer.checkpoint.format.writer import (
    DigestReport,
    fold_reports,
    write_digests,
    write_shard,
    write_tables,
)
from trainium_trainer.checkpoint.root.commit import FenceToken, prepare_commit, publish
from trainium_trainer.checkpoint.root.metrics_copy import RecordCopies
from trainium_trainer.checkpoint.root.survey import prune, remove_attempts
from trainium_trainer.checkpoint.sharding import CheckpointLayout, WriteItem, merge_stages, with_stages
from trainium_trainer.models.state_dict import parse_parameter_name
from trainium_trainer.storage.errors import is_transient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.interfaces import MeshCoordinates, Position, Session

AfterMilestone: TypeAlias = "Callable[[int, ProcessGroup | None, Callable[[], None]], None]"
"""Called on every rank in the background after the commit of a milestone, with its step, the process group of the
saves, which is free then, and a callback that reports progress.
"""


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """A rank's report of its layout."""

    place: int
    stage: int
    digest: bytes
    layout: CheckpointLayout | None
    """Set by one rank of each stage; None on the others."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The items that a rank writes and, on rank 0, the layout of all ranks."""

    place: int
    """The index of this rank in the mesh and of its file."""
    items: tuple[WriteItem, ...]
    """The items in the order of this rank's file."""
    whole: CheckpointLayout | None
    """The layout of all ranks; None except on rank 0."""


def plan_saves(
    tensors: Mapping[str, Any], mesh: MeshCoordinates, group: ProcessGroup | None
) -> dict[CheckpointKind, SavePlan]:
    """Agree on the layout of the state and return the plans for it. Collective.

    Raises TypeError or ValueError, on all ranks, if the state cannot be saved.
    """
    index = file_index(mesh)
    whole: CheckpointLayout | None = None
    mine: list[CheckpointLayout] = []

    def report_layout() -> LayoutReport:
        mine.append(build_layout(tensors, mesh))
        sends = mesh.dp_rank == 0 and mesh.tp_rank == 0
        return LayoutReport(index, mesh.pp_rank, mine[0].digest, mine[0] if sends else None)

    def decide(reports: list[LayoutReport]) -> dict[str, int]:
        nonlocal whole
        whole, moved = merge_reports(reports)
        return moved

    moved = reduce_on_root(report_layout, decide, group, "layout")
    local_layout = with_stages(mine[0], moved)
    plans: dict[CheckpointKind, SavePlan] = {}
    for kind, is_saved in ((CheckpointKind.STATE, lambda _: True), (CheckpointKind.WEIGHTS, is_weight)):
        plans[kind] = SavePlan(index, local_layout.select(is_saved).plan_items(index), whole and whole.select(is_saved))
    return plans


def merge_reports(reports: Sequence[LayoutReport]) -> tuple[CheckpointLayout, dict[str, int]]:
    """Return the layout of all stages, and the stage that writes each tensor that several hold.

    Raises ValueError when ranks of a stage report different layouts, or a value would not be written exactly once.
    """
    if sorted(report.place for report in reports) != list(range(len(reports))):
        raise ValueError("two ranks have one place in the mesh")
    stages = {report.stage: report for report in reports if report.layout is not None}
    for rank, report in enumerate(reports):
        if report.digest != stages[report.stage].digest:
            raise ValueError(f"rank {rank} divides the state otherwise than others of pipeline stage {report.stage}")
    layouts = [report.layout for _, report in sorted(stages.items()) if report.layout is not None]
    whole = merge_stages(layouts)
    if problem := whole.find_problem():
        raise ValueError(f"the state cannot be saved: {problem}")
    holders: dict[str, int] = {}
    for layout in layouts:
        for name in layout.tensors:
            holders[name] = holders.get(name, 0) + 1
    return whole, {name: whole.tensors[name].stage for name, count in holders.items() if count > 1}


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
        self.stop_requested = threading.Event()
        """Set when the process has been asked to stop: from then on no retry waits for space on a full store."""
        self._sleep = session.retry.sleep
        self._retry = replace(session.retry, sleep=self._pause, is_retryable=self._is_worth_retrying)
        self._config, self._config_digest = session.config, session.config_digest
        self._settings = dict(session.settings)
        self._token = token
        self._ensure_lease = ensure_lease
        """Called by the first rank before a commit: claims the fence if the start could not."""
        self._known_bad = known_bad
        self._after_milestone = after_milestone
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging: StagingBuffers | None = None
        self._plans: dict[CheckpointKind, SavePlan] = {}
        self._started = 0.0
        self._published = ""
        """The attempt whose receipt this rank is publishing or published last."""
        self.saves = 0
        """Saves that have succeeded."""
        self.committed_step = -1
        """The newest committed step that this rank knows."""
        self.milestone_tokens = 0
        """The position, in tokens, of the newest milestone that this rank knows."""

    def prepare(self, leftovers: list[str]) -> None:
        """Allocate the staging buffers, agree on the save plan, and remove leftovers, in the background."""

        def work() -> None:
            live = flatten(self._state.state_dict())
            self._staging = StagingBuffers(live)
            self._plans = plan_saves(live, self._mesh, self._group)
            if self._mesh.rank == 0:
                with contextlib.suppress(OSError):  # leftovers are no reason to stop training
                    remove_attempts(self._storage, leftovers)

        self._run(work, "prepare")

    @property
    def busy(self) -> bool:
        """Whether a save (or the preparation) is in progress on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, position: Position, what: Save) -> None:
        """Copy the state as of `position` and save it in the background; waits for an earlier save of this rank."""
        self.wait()
        live = flatten(self._state.state_dict())
        if self._staging is None or not self._staging.fits(live):
            self._staging, self._plans = StagingBuffers(live), {}
        whole = Save.STATE in what
        tensors = self._staging.fill(live, lambda name: whole or is_weight(name))

        unplanned = None if self._plans else live

        def work() -> None:
            if unplanned is not None:
                self._plans = plan_saves(unplanned, self._mesh, self._group)
            self._save(position, tensors, what)

        self._run(work, f"save-{position.step}")

    def poll(self) -> None:
        """Raise the error of the background thread, once; raise TooSlowError for a save that exceeds the time limit."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self.busy and self._seconds_left() <= 0:
            raise self._too_slow()

    def wait(self) -> None:
        """Wait until no save is in progress; raises like `poll`."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._seconds_left()))
            if self._thread.is_alive():
                raise self._too_slow()
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

    def _save(self, position: Position, tensors: dict[str, torch.Tensor], what: Save) -> None:
        if Save.STATE in what:
            self._write(position, tensors, folder_name(position.step), CheckpointKind.STATE)
            self.committed_step = position.step
            if self._mesh.rank == 0:
                with contextlib.suppress(OSError):  # an extra old checkpoint is no reason to stop training
                    prune(self._storage, self._config.durable.keep_last, self._known_bad, position.step)
        if Save.MILESTONE in what:
            self._write(position, tensors, milestone_name(position.step), CheckpointKind.WEIGHTS)
            self.milestone_tokens = position.tokens
            if self._after_milestone is not None:
                self._extend_time_limit()
                self._after_milestone(position.step, self._group, self._extend_time_limit)
        self.saves += 1
        if self._mesh.rank == 0:
            RecordCopies(self._config, self._storage).send()

    def _extend_time_limit(self) -> None:
        """Restart the time limit: the work after a milestone may take longer than a save, but must make progress."""
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
        """Write the tables and commit, on the coordinator, after the last write of all ranks."""
        attempt, whole = f"{folder}/{self._token.attempt}", self._plans[kind].whole
        assert whole is not None, "rank 0 has the layout of all"
        self._ensure_lease()
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
        self._published = f"{folder}/{self._token.attempt}"
        publish(self._storage, receipt, self._retry, damaged=folder in self._known_bad)


def is_weight(name: str) -> bool:
    """Return whether a milestone contains the tensor of this name."""
    return parse_parameter_name(name) is not None
