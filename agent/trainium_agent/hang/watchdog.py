"""Sample this pod's ranks: how long each has been stalled, and how long its steps take.

Invariant: a sample costs a rank nothing (shared memory and /proc are read) and signals no process.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from trainium_agent.hang.detection import Calibration, RankSample, Stall, StallWatch, limit_of, percentile
from trainium_agent.linux import kernel
from trainium_agent.linux.kernel import CpuWait
from trainium_contract.status.results import RunStage
from trainium_contract.wire.messages import StepTiming, TrainerPhase
from trainium_worker import Activity, ProgressPhase, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.workload.base import Workload
    from trainium_contract.spec.recovery import HangSpec

_LONGEST_INTERVAL_SECONDS = 0.5
_SAMPLES_PER_LIMIT = 8
_ASK_KERNEL_AFTER_SECONDS = 0.5
_TIMED_STEPS = 20
"""Newest steps that a `StepTiming` stands for."""
_FEWEST_TIMED_STEPS = 3
_PHASES = {
    Activity.INIT: TrainerPhase.INIT,
    Activity.LOAD: TrainerPhase.LOAD,
    Activity.COMPILE: TrainerPhase.COMPILE,
    Activity.STEP: TrainerPhase.STEP,
    Activity.SAVE: TrainerPhase.SAVE,
}
_WAITING = {Waiting.NO: False, Waiting.YES: True, Waiting.MAYBE: None}
_ENDING = (ProgressPhase.FINISHED, ProgressPhase.YIELDED, ProgressPhase.FAILED)


def sample_seconds(spec: HangSpec) -> float:
    """Return the seconds between two samples."""
    return min(_LONGEST_INTERVAL_SECONDS, spec.step_floor_seconds / _SAMPLES_PER_LIMIT)


class HangWatch:
    """The samples of one generation's ranks on this pod."""

    def __init__(
        self,
        spec: HangSpec,
        progress_of: Callable[[int], Path],
        workload: Workload,
        *,
        generation: int,
        world: int,
        calibration: Calibration,
    ) -> None:
        self._spec = spec
        self._progress_of = progress_of
        self._workload = workload
        self._generation = generation
        self._world = world
        self._calibration = calibration
        self._interval = sample_seconds(spec)
        self._watch = StallWatch()
        self._waits = CpuWait()
        self._starting_since: dict[int, float | None] = {}
        self._quiet_since: dict[int, tuple[tuple[int, int], float]] = {}
        self.timing: StepTiming | None = None
        """Step times of this pod's ranks; None until enough steps were made."""

    def sample(self, living: Iterable[RankProcess]) -> tuple[Stall, ...]:
        """Sample the ranks now."""
        now = time.monotonic()
        samples, timings, pids = [], [], set()
        for process in living:
            sample, timing = self._sample_rank(process, now)
            samples.append(sample)
            timings.append(timing)
            pids.add(process.pid)
        known = (timing for timing in timings if timing is not None)
        self.timing = max(known, key=lambda timing: timing.own_seconds, default=None)  # of the rank with the most work
        self._waits.forget_others(frozenset(pids))
        return self._watch.sample(now, samples)

    def _sample_rank(self, process: RankProcess, now: float) -> tuple[RankSample, StepTiming | None]:
        began = self._starting_since.setdefault(process.pid, now)
        path = self._progress_of(process.local_rank)
        found = self._workload.read(path)
        record, pulse = found if found is not None else (None, None)
        current = record is not None and (record.generation, record.attempt) == (self._generation, process.attempt)
        if record is None or pulse is None or not current:
            return self._sample_quiet(process, now), None
        phase = _PHASES[pulse.activity]
        if phase is not TrainerPhase.INIT and began is not None:
            self._calibration.note_init(self._world, now - began)
            self._starting_since[process.pid] = None
        if pulse.first_step_seconds:
            self._calibration.note_first_step(self._world, pulse.first_step_seconds)
        if record.phase in _ENDING:
            phase = TrainerPhase.SAVE  # what is left may be storage, and its peers may still save
        lengths = tuple(length for length, _ in pulse.steps)
        usual = self._calibration.usual(self._world, lengths)
        sign = (process.pid, pulse.beats)
        state = self._kernel_state(process, sign, now)
        sample = RankSample(
            rank=process.rank,
            sign=sign,
            phase=phase,
            step=record.step,
            limit=self._workload.step_limit(path, limit_of(phase, self._spec, usual, state=state[0])),
            waiting=_WAITING[pulse.waiting],
            state=state[0],
            cpu_seconds=state[1],
            stage=RunStage.of(record.stage),
        )
        return sample, timing_of(pulse.steps, self._waits.share(process.pid, now))

    def _sample_quiet(self, process: RankProcess, now: float) -> RankSample:
        """Sample a rank that has reported nothing in this attempt."""
        seen = self._workload.quiet_sign(process, now)
        sign = (process.pid, -1 if seen is None else seen)
        letter, cpu_seconds = self._kernel_state(process, sign, now)
        program = self._workload.hang_detection is not None
        if not program:
            usual, waiting = self._calibration.usual(self._world, ()), False
            limit = limit_of(TrainerPhase.INIT, self._spec, usual, state=letter)
        else:  # nobody knows what it does
            limit, waiting = (math.inf if seen is None else self._spec.init_seconds), None
        return RankSample(
            process.rank,
            sign,
            TrainerPhase.INIT,
            -1,
            limit,
            waiting=waiting,
            state=letter,
            cpu_seconds=cpu_seconds,
            unreported=program,
        )

    def _kernel_state(self, process: RankProcess, sign: tuple[int, int], now: float) -> tuple[str, float]:
        """Return state and processor time, read only of a rank that has not moved for a while."""
        known = self._quiet_since.get(process.rank)
        if known is None or known[0] != sign:
            self._quiet_since[process.rank] = (sign, now)
            return "", 0.0
        if now - known[1] < min(_ASK_KERNEL_AFTER_SECONDS, self._interval):
            return "", 0.0
        seen = kernel.state_of(process.pid)
        return seen.letter, seen.cpu_seconds


def timing_of(steps: tuple[tuple[float, float], ...], cpu_wait: float | None = None) -> StepTiming | None:
    """Return the medians of the newest steps of one rank; `cpu_wait` is its share of waits for a processor."""
    newest = steps[-_TIMED_STEPS:]
    if len(newest) < _FEWEST_TIMED_STEPS:
        return None
    return StepTiming(
        steps=len(newest),
        step_seconds=round(percentile([length for length, _ in newest], 0.5), 6),
        own_seconds=round(percentile([own for _, own in newest], 0.5), 6),
        cpu_wait=cpu_wait,
    )
