"""Compute the progress of training from times: steps, checkpoints, durations of starts.

No event is scheduled for a step, so hours without a fault cost nothing to simulate. Times are Unix seconds.

Guarantees:
- A step counts once, at the size at which it was first completed.
- A start resumes only from snapshots that a member has.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from trainium_contract.job import TrainingJobSpec
    from trainium_simulator.stages import StageTimes

_ROUNDING = 1e-6


class State(Enum):
    """States of the ranks of the generation in force."""

    IDLE = auto()
    JOINING = auto()
    """Ranks leave, wait for each other, or start their processes."""
    LOADING = auto()
    RUNNING = auto()
    STALLED = auto()
    """Ranks wait in a collective for a peer that failed."""


class Training:
    """The progress of one job: its newest steps, and where it resumes."""

    def __init__(self, spec: TrainingJobSpec, stages: StageTimes) -> None:
        self._spec = spec
        self._stages = stages
        self._shape = spec.batch_shape()
        self._full_size_micro_batches = self._count_micro_batches(spec.workers.replicas)
        self.state = State.IDLE
        self.size = 0
        """Nodes of the generation in force."""
        self.slowness = 1.0
        """Factor by which steps take longer, because of the slowest node."""
        self.step = 0
        """Last completed step when training stopped; `find_completed_step` also counts while it runs."""
        self.newest_step = 0
        """The newest completed step of all attempts."""
        self.durable_step = 0
        self.rollbacks = 0
        """Number of resumptions from the durable tier that repeat steps."""
        self.resume_step = 0
        self.started_at = 0.0
        """When the processes of this attempt were started; 0 before."""
        self.loaded_at = 0.0
        self.stopped_at = 0.0
        """End of the last step before training stopped."""
        self.new_steps_by_size: dict[int, int] = {}
        """Steps completed for the first time, by size."""
        self._run_start = (0.0, 0)
        """Time and step from which the steps of this attempt are counted."""
        self._stop_at = math.inf
        """When ranks that leave complete their last step."""

    # --- steps ------------------------------------------------------------------------------------------------------

    def compute_undisturbed_step_seconds(self, size: int) -> float:
        """Return the seconds of a step on this many nodes, without slow nodes and saves."""
        return self._stages.step_seconds * self._count_micro_batches(size) / self._full_size_micro_batches

    def compute_work_seconds(self) -> float:
        """Return the seconds that all requested nodes would have needed for the samples of all new steps."""
        full_size = self._spec.workers.replicas
        samples = sum(count * self._count_samples_per_step(size) for size, count in self.new_steps_by_size.items())
        return samples / self._count_samples_per_step(full_size) * self.compute_undisturbed_step_seconds(full_size)

    def _count_samples_per_step(self, size: int) -> int:
        """Return the samples of a step on this many nodes."""
        return self._shape.batch(size) or self._shape.global_batch_size or 1

    def _count_micro_batches(self, size: int) -> int:
        """Return the micro-batches of a step on each rank, on this many nodes."""
        return max(1, self._shape.micro_batches(size))

    @property
    def current_step_seconds(self) -> float:
        """Seconds of a step with the current nodes, slow nodes and saves included."""
        seconds = self.compute_undisturbed_step_seconds(self.size) * self.slowness
        save_interval = self._count_steps_between_saves(seconds)
        return seconds if save_interval is None else seconds + self._stages.save_stall_seconds / save_interval

    def _count_steps_between_saves(self, seconds: float) -> int | None:
        """Return the steps between two durable saves if a step takes `seconds`; None without saves."""
        durable = self._spec.checkpoint.durable
        by_time = None if durable.every_seconds is None else max(1, math.ceil(durable.every_seconds / seconds))
        return min((steps for steps in (by_time, durable.every_steps) if steps is not None), default=None)

    def find_completed_step(self, now: float) -> int:
        """Return the last step completed by `now`."""
        if self.state is not State.RUNNING:
            return self.step
        started_at, first = self._run_start
        elapsed = min(now, self._stop_at) - started_at
        return first + max(0, math.floor(elapsed / self.current_step_seconds + _ROUNDING))

    def find_completed_step_end(self, now: float) -> float:
        """Return when the last step completed by `now` ended."""
        if self.state is not State.RUNNING:
            return self.stopped_at
        started_at, first = self._run_start
        completed = self.find_completed_step(now) - first
        return started_at + completed * self.current_step_seconds if completed else self.stopped_at

    def find_step_end(self, step: int) -> float:
        """Return when a step will end if nothing fails."""
        started_at, first = self._run_start
        return started_at + (step - first) * self.current_step_seconds

    def record_progress(self, now: float) -> None:
        """Count the steps completed by `now`, and update the newest durable step."""
        step = self.find_completed_step(now)
        if step > self.newest_step:
            self.new_steps_by_size[self.size] = self.new_steps_by_size.get(self.size, 0) + step - self.newest_step
            self.newest_step = step
        if self.state is State.RUNNING:
            save_interval = self._count_steps_between_saves(self.current_step_seconds)
            committed = step - math.ceil(self._stages.save_seconds / self.current_step_seconds)
            if save_interval is not None and committed > 0:
                self.durable_step = max(self.durable_step, committed // save_interval * save_interval)

    # --- halts and starts -------------------------------------------------------------------------------------------

    def interrupt(self, now: float, state: State) -> None:
        """Stop training at `now`, and enter another state than RUNNING."""
        if self.state is State.RUNNING:
            self.record_progress(now)
            self.stopped_at = self.find_completed_step_end(now)
            self.step = self.find_completed_step(now)
        self.state = state
        self._stop_at = math.inf

    def stop_after_current_step(self, now: float) -> float:
        """Let the current step be the last one, because ranks leave; return when it ends."""
        started_at, _ = self._run_start
        completed = math.ceil((now - started_at) / self.current_step_seconds - _ROUNDING)
        self._stop_at = started_at + max(0, completed) * self.current_step_seconds
        return self._stop_at

    def set_slowness(self, now: float, slowness: float) -> None:
        """Change the factor of the slowest node from `now` on; the share of the current step that is done stays."""
        if slowness == self.slowness:
            return
        self.record_progress(now)
        if self.state is State.RUNNING:
            step = self.find_completed_step(now)
            self.stopped_at = self.find_completed_step_end(now)
            completed_share = (now - self.find_step_end(step)) / self.current_step_seconds
            self.slowness = slowness
            self._run_start = (now - max(0.0, completed_share) * self.current_step_seconds, step)
        self.slowness = slowness

    def choose_resume_step(self, lost_ranks: Collection[int]) -> int:
        """Return the newest step that can be restored without the memory of these node ranks."""
        memory = self._spec.checkpoint.memory
        if not memory.every_steps:
            return self.durable_step
        if lost_ranks and self._spec.workload.divides_state:
            missing = set(lost_ranks)
            buddy_distance = max(1, self.size // 2)
            buddy_is_lost = any((rank + buddy_distance) % max(1, self.size) in missing for rank in missing)
            if not memory.buddies or buddy_is_lost or self.size < 2:
                return self.durable_step
        if self.size and len(set(lost_ranks)) >= self.size:
            return self.durable_step
        return max(self._find_newest_in_memory(), self.durable_step)

    def _find_newest_in_memory(self) -> int:
        """Return the step of the newest snapshot in memory; the newest step if the job takes no snapshots."""
        return self.step - self.step % (self._spec.checkpoint.memory.every_steps or 1)

    def estimate_loading_seconds(self, resume_step: int, *, newcomers: bool) -> float:
        """Return the seconds of rendezvous, model construction and loading before a start from this step."""
        uses_memory = self._spec.checkpoint.memory.every_steps
        stages = self._stages
        if self.step == 0 and resume_step == 0:
            seconds = stages.load_memory_seconds
        elif not uses_memory or resume_step < self._find_newest_in_memory():
            seconds = stages.load_durable_seconds
        else:
            seconds = stages.load_peer_seconds if newcomers else stages.load_memory_seconds
        return stages.rendezvous_seconds + seconds

    def rollback(self) -> int:
        """Discard all steps after the durable checkpoint; return their number."""
        lost = remaining = self.newest_step - self.durable_step
        for size in sorted(self.new_steps_by_size, reverse=True):
            removed = min(remaining, self.new_steps_by_size[size])
            self.new_steps_by_size[size] -= removed
            remaining -= removed
        self.rollbacks += lost > 0
        self.newest_step = self.step = self.resume_step = self.durable_step
        return lost

    def start_steps(self, now: float, resume_step: int, *, first_step_delay: float) -> None:
        """Start training after `resume_step` at `now`; the first step takes `first_step_delay` seconds longer."""
        self.state, self.loaded_at = State.RUNNING, now
        self.rollbacks += resume_step < self._find_newest_in_memory()
        self.step = self.resume_step = resume_step
        self.stopped_at = now
        self._run_start = (now + first_step_delay, resume_step)
        self._stop_at = math.inf
