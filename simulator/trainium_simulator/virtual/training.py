"""Where training is: steps, snapshots, how long a start takes. Arithmetic alone, so that healthy hours cost nothing.

Invariants: a step counts once, at the size at which it was first made; nothing is resumed from what nobody holds.
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
    """They leave, wait for each other, or their processes start."""
    LOADING = auto()
    RUNNING = auto()
    STALLED = auto()
    """They wait in a collective for somebody who does not come."""


class Training:
    """The run."""

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
        self.best = 0
        """The newest step that was ever completed."""
        self.durable = 0
        self.rollbacks = 0
        """Number of resumptions from the durable tier, with steps to make again."""
        self.resume = 0
        self.started = 0.0
        """When the processes of the present attempt were up; 0 before."""
        self.loaded = 0.0
        self.stopped = 0.0
        """When the last step before a halt ended."""
        self.fresh: dict[int, int] = {}
        """Steps that had not been made before, by the size that made them."""
        self._base = (0.0, 0)
        self._until = math.inf

    # --- steps ------------------------------------------------------------------------------------------------------

    def step_seconds(self, size: int) -> float:
        """Return a clean step at this size: as many micro-batches as it takes."""
        return self._stages.step_seconds * self._passes(size) / self._full

    def work(self) -> float:
        """Return seconds that the full size would have taken for all that was made."""
        full = self._spec.workers.replicas
        samples = sum(count * self._batch(size) for size, count in self.fresh.items())
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
        """Return when the last completed step ended."""
        if self.state is not State.RUNNING:
            return self.stopped
        at, step = self._base
        done = self.step_at(now) - step
        return at + done * self.pace if done else self.stopped

    def end_of(self, step: int) -> float:
        """Return when this step will end, if nothing happens."""
        at, base = self._base
        return at + (step - base) * self.pace

    def account(self, now: float) -> None:
        """Count what is new, and what has been committed."""
        step = self.step_at(now)
        if step > self.best:
            self.fresh[self.size] = self.fresh.get(self.size, 0) + step - self.best
            self.best = step
        if self.state is State.RUNNING:
            every = self._save_every(self.pace)
            lag = math.ceil(self._stages.save_seconds / self.pace)
            if every is not None and step - lag > 0:
                self.durable = max(self.durable, min(step - lag, (step - lag) // every * every))

    # --- halts and starts -------------------------------------------------------------------------------------------

    def halt(self, now: float, state: State) -> None:
        """Complete no more steps."""
        if self.state is State.RUNNING:
            self.account(now)
            self.stopped = self.ended_at(now)
            self.step = self.step_at(now)
        self.state = state
        self._until = math.inf

    def last_step_end(self, now: float) -> float:
        """Return when the step in hand ends: ranks that are asked to leave go then."""
        at, _ = self._base
        done = math.ceil((now - at) / self.pace - _ROUNDING)
        self._until = at + max(0, done) * self.pace
        return self._until

    def slow_down(self, now: float, slowness: float) -> None:
        """Let the slowest member decide for all from now on."""
        if slowness == self.slowness:
            return
        self.account(now)
        if self.state is State.RUNNING:
            step = self.step_at(now)
            self.stopped = self.ended_at(now)
            share = (now - self.end_of(step)) / self.pace
            self.slowness = slowness
            self._base = (now - max(0.0, share) * self.pace, step)
        self.slowness = slowness

    def resume_from(self, lost: Collection[int]) -> int:
        """Return the step that the ranks can go on from when these of them, and what their nodes held, are missing."""
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
        """Meeting, building the model and loading the state."""
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
        """Lose everything but the durable checkpoint; how many steps are to be made again."""
        lost = rolled = self.best - self.durable
        for size in sorted(self.fresh, reverse=True):
            taken = min(rolled, self.fresh[size])
            self.fresh[size] -= taken
            rolled -= taken
        self.rollbacks += lost > 0
        self.best = self.step = self.resume = self.durable
        return lost

    def run(self, now: float, resume: int, *, first_step: float) -> None:
        """Let the ranks train; the first step takes so much longer."""
        self.state, self.loaded = State.RUNNING, now
        self.rollbacks += resume < self._newest_in_memory()
        self.step = self.resume = resume
        self.stopped = now
        self._base = (now + first_step, resume)
        self._until = math.inf
