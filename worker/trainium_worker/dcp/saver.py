"""The saves of a process to the memory of the nodes: which steps are copied, and by which way."""

from __future__ import annotations

import errno
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

import trainium_worker
from trainium_worker.dcp.commit import Outcome, unite
from trainium_worker.dcp.just_in_time import JustInTimeSave
from trainium_worker.dcp.just_in_time import is_replicated as is_replicated_state
from trainium_worker.dcp.repeated import RepeatedSave, describe_layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from trainium_worker.dcp.repeated import Layout
    from trainium_worker.dcp.session import Session
    from trainium_worker.dcp.writer import MemoryWriter

VALUES_PREFIX = "values."
"""Prefix of the names of tensors that differ between ranks."""
_MIN_VALUES_BYTES = 4096
_FULL_FRACTION = 0.75
"""The filled fraction of the tensor with the values at which the next save gets a larger one."""
_SPARE_BYTES = 1 << 18
"""The largest free part of a new tensor with the values beyond `_FULL_FRACTION`; a growth to the next costs a plan."""
_COPY_FRACTION = 0.01
"""The fraction of the time that copies may take while a surviving rank can write the newest step."""
_MIN_STEP_SECONDS = 1e-4
_MAX_INTERVAL_SECONDS = 300.0
"""Longest time between two copies."""


class Saver:
    """The saves of this process, one at a time in a separate thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.just_in_time: JustInTimeSave | None = None
        """The newest step in place, if a surviving rank can write it for all."""
        self._saving: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-save")
        self._layout: Layout = []
        self._repeated: RepeatedSave | None = None
        """The last save, if a state of `_layout` can repeat it."""
        self._values_bytes = _MIN_VALUES_BYTES
        """The size of the tensor with the values."""
        self._is_nearly_full = False
        self._next_copy = 0
        """The step at which the state is copied again, the same on all ranks."""
        self._step_ended_at = self._step_seconds = self._stage_seconds = 0.0

    def pack(self, data: bytes) -> torch.Tensor:
        """Return bytes as a tensor whose size seldom changes."""
        needed = len(data)
        if self._repeated is None:  # else a rank alone would change the layout
            needed = max(round(needed / _FULL_FRACTION), min(4 * needed, needed + _SPARE_BYTES))
        while self._values_bytes < needed:
            self._values_bytes *= 2
        self._is_nearly_full = len(data) > self._values_bytes * _FULL_FRACTION
        return torch.frombuffer(bytearray(data.ljust(self._values_bytes, b"\0")), dtype=torch.uint8)

    def end_step(self) -> None:
        """Measure the step that has ended."""
        now = time.perf_counter()
        self._step_seconds, self._step_ended_at = now - self._step_ended_at, now

    def is_due(self, step: int, *, is_held: bool, is_last: bool) -> bool:
        """Return whether to copy this step, the same on all ranks. `is_held`: it is in place."""
        if self.just_in_time is None or not is_held:
            return True
        return step >= self._next_copy or is_last or trainium_worker.is_ending()

    def save(self, writer: MemoryWriter, state: dict[str, torch.Tensor], *, is_replicated: bool) -> None:
        """Copy the state, and save it in the background. `is_replicated`: each rank has all of it but values."""
        started = time.perf_counter()
        layout, repeated = describe_layout(state), self._repeated
        if repeated is None or layout != self._layout:
            is_replicated = is_replicated and is_replicated_state(state)
            outcome, state = Outcome.PLAN, writer.stage({name: tensor.detach() for name, tensor in state.items()})
        else:
            outcome = repeated.stage(state)
            if outcome == Outcome.OK and self._is_nearly_full:
                outcome = Outcome.LAST
        self._layout = layout
        self._stage_seconds = time.perf_counter() - started
        self._saving = self._thread.submit(self._write, writer, state, outcome, is_replicated=is_replicated)

    def _write(
        self, writer: MemoryWriter, state: dict[str, torch.Tensor], outcome: Outcome, *, is_replicated: bool
    ) -> None:
        """Write a state, with a plan if it has another layout than the last one. Collective."""
        repeated, session, started = self._repeated, writer.session, time.thread_time()
        self._next_copy = 0
        if repeated is not None:
            outcomes = repeated.write(writer.step, outcome)
            if unite(outcomes) & (Outcome.LAST | Outcome.PLAN):
                self._repeated = None
            if set(outcomes) != {Outcome.PLAN}:
                if self.just_in_time is not None and set(outcomes) == {Outcome.OK}:
                    seconds = self._stage_seconds + time.thread_time() - started
                    self._next_copy = writer.step + self._agree_on_interval(session, seconds)
                    self.just_in_time.set_saved(writer.step)
                return
        dcp.save(state, storage_writer=writer, process_group=session.group)
        if session.is_enabled:
            self._repeated = RepeatedSave.of_newest_save(session, state)
            self.just_in_time = _prepare_just_in_time(session, state, self.just_in_time, is_replicated=is_replicated)
            session.free_copy()

    def _agree_on_interval(self, session: Session, seconds: float) -> int:
        """Return after how many steps all ranks copy the state again; `seconds`: the cost of a copy. Collective."""
        interval = min(seconds / _COPY_FRACTION, _MAX_INTERVAL_SECONDS)
        steps = math.ceil(interval / max(self._step_seconds, _MIN_STEP_SECONDS))
        return max(session.all_gather_integers(steps))

    def finish(self) -> None:
        """Wait for the save in progress. Raises its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def wait(self) -> None:
        """Wait for the save in progress, and let the state change. Raises its error."""
        self.finish()
        if self.just_in_time is not None:
            self.just_in_time.release()


def _prepare_just_in_time(
    session: Session, state: Mapping[str, torch.Tensor], prepared: JustInTimeSave | None, *, is_replicated: bool
) -> JustInTimeSave | None:
    """Return the means to write a step when another rank fails; None if not all ranks have it. Collective."""
    layout, problem = None, ""
    has_record = trainium_worker.ENV_PROGRESS_FILE in os.environ and trainium_worker.count_launched_ranks() == 1
    if is_replicated and has_record and len(set(session.stores)) > 1:
        layout = [item for item in describe_layout(state) if not item[0].startswith(VALUES_PREFIX)]
        try:
            prepared = prepared or JustInTimeSave(session, state)
        except OSError as error:
            problem = (
                f"each step is copied, because rank {session.rank} cannot prepare to save the newest one when another "
                f"rank fails: {error.filename or session.directory}: {error.strerror}"
            )
            if error.errno == errno.ENOSPC:
                problem += "; raise the size of the memory volume"
            trainium_worker.notice(problem)
    layouts = session.all_gather("" if problem else layout)
    if layout and all(other == layout for other in layouts):
        return prepared
    if prepared is not None:
        prepared.close()
    return None
