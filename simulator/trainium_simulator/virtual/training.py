"""Compute the progress of training: steps, snapshots, durations of starts. No events, so healthy hours cost nothing.

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
    """The progress of one run."""

    def __init__(self, spec: TrainingJobSpec, stages: StageTimes) -> None:
        self._spec = spec
        self._stages = stages
        self._shape = spec.batch_shape()
        self._full = self._passes(spec.workers.replicas)
        self.state = State.IDLE
        self.size = 0
        self.slowness = 1.0
        self.step = 0
        """Last completed step, while not running."""
        self.newest_step = 0
        """The newest completed step of all attempts."""
        self.durable = 0
        self.rollbacks = 0
        """Number of resumptions from the durable tier that repeat steps."""
        self.resume = 0
        self.started = 0.0
        """Time at which the processes of this attempt were started; 0 before."""
        self.loaded = 0.0
        self.stopped = 0.0
        """End of the last step before a halt."""
        self.new_steps: dict[int, int] = {}
        """Steps completed for the first time, by size."""
        self._base = (0.0, 0)
        self._until = math.inf

    # --- steps ------------------------------------------------------------------------------------------------------

    def step_seconds(self, size: int) -> float:
        """Return the seconds of an undisturbed step at this size."""
        return self._stages.step_seconds * self._passes(size) / self._full

    def work_seconds(self) -> float:
        """Return the seconds that the full size would have taken for all new steps."""
        full = self._spec.workers.replicas
        samples = sum(count * self._batch(size) for size, count in self.new_steps.items())
        return samples / self._batch(full) * self.step_seconds(full)

    def _batch(self, size: int) -> int:
        """Return samples of a step at this size."""
        return self._shape.batch(size) or self._shape.global_batch_size or 1

    def _passes(self, size: int) -> int:
        """Return micro-batches of a step on each rank at this size."""
        return max(1, self._shape.passes(size))

    @property
    def pace(self) -> float:
        """Seconds from step to step now, with slow nodes and saves."""
        step = self.step_seconds(self.size) * self.slowness
        every = self._save_every(step)
        return step if every is None else step + self._stages.save_stall_seconds / every

    def _save_every(self, step: float) -> int | None:
        """Return steps between two durable saves."""
        durable = self._spec.checkpoint.durable
        by_time = None if durable.every_seconds is None else max(1, math.ceil(durable.every_seconds / step))
        return min((each for each in (by_time, durable.every_steps) if each is not None), default=None)

    def step_at(self, now: float) -> int:
        """Return the last completed step."""
        if self.state is not State.RUNNING:
            return self.step
        at, step = self._base
        return step + max(0, math.floor((min(now, self._until) - at) / self.pace + _ROUNDING))

    def ended_at(self, now: float) -> float:
        """Return the end of the last completed step."""
        if self.state is not State.RUNNING:
            return self.stopped
        at, step = self._base
        done = self.step_at(now) - step
        return at + done * self.pace if done else self.stopped

    def end_of(self, step: int) -> float:
        """Return the end of a step, if nothing fails."""
        at, base = self._base
        return at + (step - base) * self.pace

    def record_progress(self, now: float) -> None:
        """Count new steps, and the newest durable one."""
        step = self.step_at(now)
        if step > self.newest_step:
            self.new_steps[self.size] = self.new_steps.get(self.size, 0) + step - self.newest_step
            self.newest_step = step
        if self.state is State.RUNNING:
            every = self._save_every(self.pace)
            lag = math.ceil(self._stages.save_seconds / self.pace)
            if every is not None and step - lag > 0:
                self.durable = max(self.durable, min(step - lag, (step - lag) // every * every))

    # --- halts and starts -------------------------------------------------------------------------------------------

    def halt(self, now: float, state: State) -> None:
        """Stop completing steps."""
        if self.state is State.RUNNING:
            self.record_progress(now)
            self.stopped = self.ended_at(now)
            self.step = self.step_at(now)
        self.state = state
        self._until = math.inf

    def last_step_end(self, now: float) -> float:
        """Return the end of the current step, after which ranks leave on request."""
        at, _ = self._base
        done = math.ceil((now - at) / self.pace - _ROUNDING)
        self._until = at + max(0, done) * self.pace
        return self._until

    def set_slowness(self, now: float, slowness: float) -> None:
        """Change the pace to that of the slowest member."""
        if slowness == self.slowness:
            return
        self.record_progress(now)
        if self.state is State.RUNNING:
            step = self.step_at(now)
            self.stopped = self.ended_at(now)
            share = (now - self.end_of(step)) / self.pace
            self.slowness = slowness
            self._base = (now - max(0.0, share) * self.pace, step)
        self.slowness = slowness

    def resume_from(self, lost: Collection[int]) -> int:
        """Return the step to resume from when these ranks and the memory of their nodes are lost."""
        memory = self._spec.checkpoint.memory
        if not memory.every_steps:
            return self.durable
        newest = self._newest_in_memory()
        if lost and self._spec.trainer is not None and self._spec.trainer.data_parallel.is_sharded:
            missing = set(lost)
            half = max(1, self.size // 2)
            alone = any((rank + half) % max(1, self.size) in missing for rank in missing)
            if not memory.buddies or alone or self.size < 2:
                return self.durable
        if self.size and len(set(lost)) >= self.size:
            return self.durable
        return max(newest, self.durable)

    def _newest_in_memory(self) -> int:
        """Return the step of the newest snapshot in memory; without such snapshots, that of the newest step."""
        return self.step - self.step % (self._spec.checkpoint.memory.every_steps or 1)

    def loading_seconds(self, resume: int, *, newcomers: bool) -> float:
        """Return the seconds of rendezvous, model construction and loading."""
        memory = self._spec.checkpoint.memory.every_steps
        stages = self._stages
        if self.step == 0 and resume == 0:
            seconds = stages.load_memory_seconds
        elif not memory or resume < self._newest_in_memory():
            seconds = stages.load_durable_seconds
        else:
            seconds = stages.load_peer_seconds if newcomers else stages.load_memory_seconds
        return stages.rendezvous_seconds + seconds

    def rollback(self) -> int:
        """Return to the durable checkpoint; return the number of lost steps."""
        lost = rolled = self.newest_step - self.durable
        for size in sorted(self.new_steps, reverse=True):
            taken = min(rolled, self.new_steps[size])
            self.new_steps[size] -= taken
            rolled -= taken
        self.rollbacks += lost > 0
        self.newest_step = self.step = self.resume = self.durable
        return lost

    def run(self, now: float, resume: int, *, first_step: float) -> None:
        """Start training; the first step takes `first_step` seconds longer."""
        self.state, self.loaded = State.RUNNING, now
        self.rollbacks += resume < self._newest_in_memory()
        self.step = self.resume = resume
        self.stopped = now
        self._base = (now + first_step, resume)
        self._until = math.inf
