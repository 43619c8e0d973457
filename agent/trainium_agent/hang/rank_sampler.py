"""Sample this pod's ranks: how long each has been stalled, and how long its steps take.

Guarantees:
- A sample costs a rank nothing (shared memory and /proc are read) and signals no process.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from trainium_agent.hang.detection import (
    STOPPED,
    RankSample,
    Stall,
    StallTracker,
    compute_percentile,
    stall_limit,
)
from trainium_agent.linux import kernel
from trainium_agent.linux.kernel import CpuWaitSampler
from trainium_agent.workload.attempt import find_progress_file
from trainium_contract.wire.messages import StepTiming, TrainerPhase
from trainium_contract.worker_process.process_tree import list_descendants
from trainium_worker.progress_record import ProgressPhase
from trainium_worker.pulse import Activity, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_agent.hang.detection import Calibration
    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.workload import Workload
    from trainium_contract.spec.recovery import HangSpec
    from trainium_contract.wire.messages import Membership

_MAX_INTERVAL_SECONDS = 0.5
_SAMPLES_PER_LIMIT = 8
_ASK_KERNEL_AFTER_SECONDS = 0.5
_SEARCHES_PER_LIMIT = 4
"""Searches for a stopped descendant in the shortest limit: a node may have thousands of them."""
_TIMED_STEPS = 20
"""Number of the newest steps in a `StepTiming`."""
_MIN_TIMED_STEPS = 3
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
    return min(_MAX_INTERVAL_SECONDS, spec.step_floor_seconds / _SAMPLES_PER_LIMIT)


class RankSampler:
    """Samples the ranks of one generation on this pod."""

    def __init__(
        self, settings: AgentSettings, membership: Membership, workload: Workload, calibration: Calibration
    ) -> None:
        self._settings = settings
        self._spec = settings.hang
        self._workload = workload
        self._generation = membership.generation
        self._world_size = len(membership.members) * membership.processes_per_node
        self._calibration = calibration
        self._interval = sample_seconds(self._spec)
        self._stall_tracker = StallTracker()
        self._cpu_waits = CpuWaitSampler()
        self._starting_since: dict[int, float | None] = {}
        self._unchanged_since: dict[int, tuple[tuple[int, int], float]] = {}
        self._stopped_descendants: dict[int, tuple[float, str]] = {}
        self.timing: StepTiming | None = None
        """Step times of this pod's ranks; None until enough steps are complete."""

    def sample(self, living: Iterable[RankProcess]) -> tuple[Stall, ...]:
        """Sample the ranks now."""
        now = time.monotonic()
        samples, timings, pids = [], [], set()
        for process in living:
            sample, timing = self._sample_rank(process, now)
            samples.append(sample)
            if timing is not None:
                timings.append(timing)
            pids.add(process.pid)
        self.timing = max(timings, key=lambda timing: timing.own_seconds, default=None)  # the rank with the most work
        self._cpu_waits.keep_only(frozenset(pids))
        return self._stall_tracker.sample(now, samples, excused=self._workload.roles.is_waiting)

    def _sample_rank(self, process: RankProcess, now: float) -> tuple[RankSample, StepTiming | None]:
        starting_since = self._starting_since.setdefault(process.pid, now)
        path = find_progress_file(self._settings, self._generation, process.local_rank)
        reading = self._workload.read(path)
        if reading is None or reading.pulse is None:
            return self._sample_unreported(process, now), None
        record, pulse = reading.record, reading.pulse
        if (record.generation, record.attempt) != (self._generation, process.attempt):
            return self._sample_unreported(process, now), None
        phase = _PHASES[pulse.activity]
        if phase is not TrainerPhase.INIT and starting_since is not None:
            self._calibration.record_init(self._world_size, now - starting_since)
            self._starting_since[process.pid] = None
        if pulse.first_step_seconds:
            self._calibration.record_first_step(self._world_size, pulse.first_step_seconds)
        if record.phase in _ENDING:
            phase = TrainerPhase.SAVE  # the remaining work may be storage, and its peers may still save
        step_seconds = tuple(length for length, _ in pulse.steps)
        baseline = self._calibration.compute_baseline(self._world_size, step_seconds)
        activity = (process.pid, pulse.beats)
        letter, cpu_seconds = self._read_kernel_state(process, activity, now)
        limit = stall_limit(phase, self._spec, baseline, state=letter)
        if letter not in STOPPED:  # a stopped process is in no save that its output does not show
            limit = self._workload.step_limit(path, limit)
        stall = Stall(
            rank=process.rank,
            phase=phase,
            step=record.step,
            seconds=0.0,
            limit=limit,
            reported_waiting=_WAITING[pulse.waiting],
            state=letter,
            stage=record.stage,
        )
        timing = summarize_steps(pulse.steps, self._cpu_waits.share(process.pid, now))
        return RankSample(stall, activity, cpu_seconds), timing

    def _sample_unreported(self, process: RankProcess, now: float) -> RankSample:
        """Sample a rank that has reported nothing in this attempt."""
        counter = self._workload.count_activity(process, now)
        activity = (process.pid, -1 if counter is None else counter)
        letter, cpu_seconds = self._read_kernel_state(process, activity, now)
        is_program = self._workload.hang_detection is not None
        if not is_program:
            baseline, waiting = self._calibration.compute_baseline(self._world_size, ()), False
            limit = stall_limit(TrainerPhase.INIT, self._spec, baseline, state=letter)
        else:  # its state is unknown
            limit, waiting = (math.inf if counter is None else self._spec.init_seconds), None
            if letter in STOPPED:
                limit = stall_limit(
                    TrainerPhase.STEP, self._spec, self._calibration.compute_baseline(self._world_size, ())
                )
        stall = Stall(
            process.rank,
            TrainerPhase.INIT,
            -1,
            0.0,
            limit,
            reported_waiting=waiting,
            state=letter,
            unreported=is_program,
        )
        return RankSample(stall, activity, cpu_seconds)

    def _read_kernel_state(self, process: RankProcess, activity: tuple[int, int], now: float) -> tuple[str, float]:
        """Return state and processor time; they are read only for a rank that has been stalled for a while."""
        unchanged = self._unchanged_since.get(process.rank)
        if unchanged is None or unchanged[0] != activity:
            self._unchanged_since[process.rank] = (activity, now)
            return "", 0.0
        if now - unchanged[1] < min(_ASK_KERNEL_AFTER_SECONDS, self._interval):
            return "", 0.0
        process_state = kernel.read_process_state(process.pid)
        letter = process_state.letter
        if self._workload.hang_detection is not None and letter not in STOPPED:
            letter = self._find_stopped_descendant(process.pid, now) or letter
        return letter, process_state.cpu_seconds

    def _find_stopped_descendant(self, pid: int, now: float) -> str:
        """Return the state of a stopped descendant: a program may be a shell or launcher of the process that trains."""
        searched_at, letter = self._stopped_descendants.get(pid, (-math.inf, ""))
        if now >= searched_at + self._spec.step_floor_seconds / _SEARCHES_PER_LIMIT:
            letters = (kernel.read_process_state(descendant).letter for descendant in list_descendants(pid))
            letter = next((found for found in letters if found in STOPPED), "")
            self._stopped_descendants[pid] = (now, letter)
        return letter


def summarize_steps(steps: tuple[tuple[float, float], ...], cpu_wait: float | None = None) -> StepTiming | None:
    """Return the medians of the newest steps of one rank; `cpu_wait` is its share of waits for a processor."""
    newest = steps[-_TIMED_STEPS:]
    if len(newest) < _MIN_TIMED_STEPS:
        return None
    return StepTiming(
        steps=len(newest),
        step_seconds=round(compute_percentile([length for length, _ in newest], 0.5), 6),
        own_seconds=round(compute_percentile([own_seconds for _, own_seconds in newest], 0.5), 6),
        cpu_wait=cpu_wait,
    )
