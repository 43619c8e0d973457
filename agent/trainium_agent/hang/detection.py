"""Decide when a stalled process is hung, and which rank is to blame: pure functions of observations.

A rank is stalled while its progress counter does not change. The time limit depends on its phase; the limit of a step
follows the job's step times. The rank to blame is determined from the reports of all agents of the generation.

Guarantees:
- Stalls add up over observations only, so an agent that was itself frozen sees no stall of its ranks.
- The stall of a stopped rank begins when it is first seen stopped, because a silent rank may have worked until then.
- A rank that progresses, saves, loads or compiles within its limit excuses all ranks that wait for it.
- A rank that waits for its peers is a victim, never the culprit, unless a signal stopped it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from trainium_agent.exits.restart_policy import GenerationState, decide_restart
from trainium_contract.exit_codes import ExitCode
from trainium_contract.status.results import RunStage
from trainium_contract.wire.messages import TrainerPhase
from trainium_worker import GENERATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainium_contract.spec.recovery import HangSpec

_MAX_SAMPLE_SECONDS = 2.0
"""Longest time that a sample adds to a stall; in a longer gap the agent itself did not run."""
_ENOUGH_STEPS = 3
_BUSY = 0.5
_FIRST_STEP_FLOORS = 4.0
_INIT_FLOORS = 8.0
_MIN_RETRY_SECONDS = 0.25
_MAX_RETRY_SECONDS = 5.0
STOPPED = ("T", "t")
_UNINTERRUPTIBLE = "D"
_STAGES = {RunStage.EXPORT: "writing artifacts", RunStage.EVALUATE: "evaluating", GENERATE: "waiting for answers"}
_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible system call",
    "Z": "dead, not collected",
}


@dataclass(frozen=True, slots=True)
class BaselineTimes:
    """Measured times of this job on this pod, in seconds, from which the limits follow."""

    steps: tuple[float, ...] = ()
    """Durations of the newest steps, without first steps."""
    first_step: float = 0.0
    """Longest first step at the current size; 0 for none yet."""
    init: float = 0.0
    """Longest initialization before loading; 0 for none yet."""


def stall_limit(phase: TrainerPhase, spec: HangSpec, baseline: BaselineTimes, *, state: str = "") -> float:
    """Return how long a rank may be stalled in a phase, in seconds; `state` is its state letter in /proc, if known.

    A stopped process neither waits for storage nor compiles, so the limit of a step applies to it.
    """
    limit = _compute_phase_limit(phase, spec, baseline)
    return min(limit, _compute_phase_limit(TrainerPhase.STEP, spec, baseline)) if state in STOPPED else limit


def _compute_phase_limit(phase: TrainerPhase, spec: HangSpec, baseline: BaselineTimes) -> float:
    floor, factor = spec.step_floor_seconds, spec.step_factor
    match phase:
        case TrainerPhase.INIT:
            return min(spec.init_seconds, _calibrate_limit(baseline.init, _INIT_FLOORS * floor, factor))
        case TrainerPhase.COMPILE:
            return min(spec.compile_seconds, _calibrate_limit(baseline.first_step, _FIRST_STEP_FLOORS * floor, factor))
        case TrainerPhase.LOAD:
            return spec.load_seconds
        case TrainerPhase.SAVE:
            return spec.save_seconds
        case TrainerPhase.STEP:
            steps = baseline.steps if len(baseline.steps) >= _ENOUGH_STEPS else (*baseline.steps, baseline.first_step)
            return max(floor, factor * compute_percentile(steps, 0.99))


def _calibrate_limit(baseline: float, floor: float, factor: float) -> float:
    """Return a limit from earlier durations; infinite while there is none."""
    return max(floor, factor * baseline) if baseline > 0 else math.inf


def compute_percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Stall:
    """The stall of one rank."""

    rank: int
    phase: TrainerPhase
    step: int
    """Last step that it completed."""
    seconds: float
    limit: float
    """Seconds that the rank may be stalled in this phase."""
    reported_waiting: bool | None
    """Whether it reports that it waits for its peers; None when its work contains collectives."""
    state: str = ""
    """State letter of /proc; empty if not read."""
    busy: float = 0.0
    """Processor time per second of the stall."""
    stage: str = RunStage.TRAIN
    """Stage of the run, by the name that the rank reports."""
    unreported: bool = False
    """Whether it is a rank of a program that has reported nothing; it excuses no rank that has reported."""

    @property
    def overdue(self) -> bool:
        """Whether the stall exceeds its limit."""
        return self.seconds >= self.limit

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger stopped the process."""
        return self.state in STOPPED

    @property
    def is_waiting(self) -> bool | None:
        """Whether it waits for its peers; None if unknown."""
        if self.stopped:
            return False
        if self.reported_waiting is None and (self.state == _UNINTERRUPTIBLE or self.busy >= _BUSY):
            return False
        return self.reported_waiting


@dataclass(frozen=True, slots=True)
class RankSample:
    """A sample of one living rank."""

    stall: Stall
    """The rank's state, without the duration of its stall."""
    activity: tuple[int, int]
    """Changes with all progress of the rank."""
    cpu_seconds: float = 0.0
    """Processor time so far; used if the state letter was read."""


class StallTracker:
    """Adds up the stalls of one pod's ranks over successive samples."""

    def __init__(self) -> None:
        self._sampled_at: float | None = None
        self._states: dict[int, _StallState] = {}

    def sample(self, now: float, samples: Iterable[RankSample], *, excused: bool = False) -> tuple[Stall, ...]:
        """Return the stall of each sampled rank; `now` is monotonic.

        `excused`: the time since the last sample counts for no stall, because training waits for a role.
        """
        elapsed = 0.0 if self._sampled_at is None else min(max(0.0, now - self._sampled_at), _MAX_SAMPLE_SECONDS)
        elapsed = 0.0 if excused else elapsed
        self._sampled_at = now
        previous, self._states = self._states, {}
        stalls = []
        for sample in samples:
            state = previous.get(sample.stall.rank)
            if state is None or state.activity != sample.activity:
                state = _StallState(sample.activity)
            else:
                state = replace(state, seconds=state.seconds + elapsed)
            if not sample.stall.stopped:
                state = replace(state, stopped_at=None)
            elif state.stopped_at is None:
                state = replace(state, stopped_at=state.seconds)
            if state.cpu_at is None and sample.stall.state:
                state = replace(state, cpu_at=(sample.cpu_seconds, state.seconds))
            self._states[sample.stall.rank] = state
            stalls.append(_measure_stall(sample, state))
        return tuple(stalls)


@dataclass(frozen=True, slots=True)
class _StallState:
    activity: tuple[int, int]
    seconds: float = 0.0
    cpu_at: tuple[float, float] | None = None
    """Processor time, and the length of the stall, when /proc was first read."""
    stopped_at: float | None = None
    """Length of the stall when the process was first seen stopped; None while it is not."""


def _measure_stall(sample: RankSample, state: _StallState) -> Stall:
    busy = 0.0
    if state.cpu_at is not None and sample.stall.state:
        cpu, since = state.cpu_at
        busy = (sample.cpu_seconds - cpu) / (state.seconds - since) if state.seconds > since else 0.0
    limit = round(min(sample.stall.limit, 1e9), 3)
    seconds = round(state.seconds - (state.stopped_at or 0.0), 3)
    return replace(sample.stall, seconds=seconds, limit=limit, busy=round(max(0.0, busy), 3))


class FindingKind(StrEnum):
    """The kinds of findings."""

    PROGRESSING = "Progressing"
    """No rank is overdue, or a rank still has time."""
    STUCK = "Stuck"
    """Some ranks are to blame."""
    COLLECTIVE = "Collective"
    """All ranks wait, or all are in the same state: no rank differs."""
    SILENT = "Silent"
    """The ranks of all agents that answered wait, and some agents did not answer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of an inquiry into a stall."""

    kind: FindingKind
    culprits: tuple[int, ...] = ()
    """Global ranks to blame."""
    silent: tuple[int, ...] = ()
    """Node ranks that did not answer."""
    retry_seconds: float = 0.0
    """Seconds until the next inquiry, if an overdue rank is excused; 0: only when another rank is overdue."""

    def encode(self) -> str:
        """Return the value as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Finding:
        """Decode a text of an agent of the same generation."""
        body = json.loads(text)
        return Finding(FindingKind(body["kind"]), tuple(body["culprits"]), tuple(body["silent"]), body["retry_seconds"])


def find_culprits(answers: Mapping[int, Sequence[Stall]], members: int) -> Finding:
    """Find the ranks to blame from the reports of the agents (by node rank) about all their living ranks."""
    ranks = [rank for node in answers.values() for rank in node]
    overdue = [rank for rank in ranks if rank.overdue]
    if not overdue:
        return Finding(FindingKind.PROGRESSING)
    reported = [rank for rank in ranks if not rank.unreported] or ranks
    # If some ranks of a program report nothing, nobody knows which rank waits for which.
    culprits = _find_outliers(overdue, ranks) if reported == ranks else [rank for rank in ranks if rank.stopped]
    if culprits:
        return Finding(FindingKind.STUCK, culprits=tuple(sorted(rank.rank for rank in culprits)))
    remaining = [rank.limit - rank.seconds for rank in reported if not rank.overdue]
    if remaining:
        retry = min(max(min(remaining), _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
        return Finding(FindingKind.PROGRESSING, retry_seconds=retry)
    silent = tuple(sorted(set(range(members)) - set(answers)))
    if silent:
        return Finding(FindingKind.SILENT, silent=silent)
    return Finding(FindingKind.COLLECTIVE)


def _find_outliers(overdue: list[Stall], ranks: list[Stall]) -> list[Stall]:
    """Return the overdue ranks that differ from the rest; none if all are in the same state, or may be soon."""
    stopped = [rank for rank in overdue if rank.stopped]
    if stopped:
        return stopped
    is_only_rank = len(ranks) == 1
    outliers = [rank for rank in overdue if rank.is_waiting is False]
    if outliers:
        phases = {rank.phase for rank in outliers}
        candidates = [rank for rank in ranks if not rank.overdue and rank.is_waiting is False and rank.phase in phases]
        may_follow = any(rank.seconds > rank.limit / 2 for rank in candidates)
        return outliers if is_only_rank or (len(outliers) < len(ranks) and not may_follow) else []
    outliers = [rank for rank in overdue if rank.is_waiting is None]
    others_wait = all(rank.overdue and rank.is_waiting for rank in ranks if rank not in outliers)
    return outliers if is_only_rank or (others_wait and len(outliers) < len(ranks)) else []


def after_hang(
    finding: Finding, attempt: int, best_progress: float, state: GenerationState, limit: int
) -> GenerationState:
    """Return the shared state after the ranks of `attempt` were ended for a hang; it counts once, as any failure."""
    next_state = decide_restart(ExitCode.HUNG, attempt, best_progress, state, limit).state
    if next_state.attempt > state.attempt and finding.kind is FindingKind.COLLECTIVE:
        return replace(next_state, unexplained_failures=next_state.unexplained_failures + 1)
    return next_state


def describe_stall(stall: Stall, pod: str) -> str:
    """Describe a stall in a sentence without its full stop."""
    waiting_words = {
        True: "waiting for its peers",
        False: "not waiting for peers",
        None: "in work that has collectives inside",
    }
    notes = [waiting_words[stall.is_waiting], *([_STATES[stall.state]] if stall.state in _STATES else [])]
    if stall.busy >= _BUSY:
        notes.append(f"using {stall.busy:.0%} of a processor")
    where = f"{_describe_location(stall)} ({', '.join(notes)})"
    return f"rank {stall.rank} of pod {pod} made no progress for {stall.seconds:.0f} s {where}"


def _describe_location(stall: Stall) -> str:
    if stall.stage in _STAGES:
        return f"while {_STAGES[stall.stage]} after step {max(stall.step, 0)}"
    match stall.phase:
        case TrainerPhase.STEP:
            return f"in step {stall.step + 1}"
        case TrainerPhase.COMPILE:
            return f"in step {max(stall.step, 0) + 1}, its first"
        case TrainerPhase.SAVE:
            return f"while saving after step {max(stall.step, 0)}"
        case TrainerPhase.LOAD:
            return "while loading its state"
        case TrainerPhase.INIT:
            return "while starting"


def encode_stalls(stalls: Sequence[Stall]) -> str:
    """Encode an agent's answer about its ranks."""
    return json.dumps([asdict(stall) for stall in stalls])


def decode_stalls(text: str) -> tuple[Stall, ...]:
    """Decode a text of an agent of the same generation."""
    return tuple(_decode_stall(body) for body in json.loads(text))


def _decode_stall(body: dict[str, Any]) -> Stall:
    fields = {name: body[name] for name in Stall.__dataclass_fields__ if name in body}
    return Stall(**{**fields, "phase": TrainerPhase(body["phase"])})


@dataclass(slots=True)
class Calibration:
    """Longest initializations and first steps of this pod, by world size (another size compiles other graphs)."""

    _first_steps: dict[int, float] = field(default_factory=dict)
    _inits: dict[int, float] = field(default_factory=dict)

    def record_first_step(self, world_size: int, seconds: float) -> None:
        """Record the length of a first step."""
        self._first_steps[world_size] = max(seconds, self._first_steps.get(world_size, 0.0))

    def record_init(self, world_size: int, seconds: float) -> None:
        """Record the length of an initialization."""
        self._inits[world_size] = max(seconds, self._inits.get(world_size, 0.0))

    def compute_baseline(self, world_size: int, steps: tuple[float, ...]) -> BaselineTimes:
        """Return the measured times at this size."""
        return BaselineTimes(steps, self._first_steps.get(world_size, 0.0), self._inits.get(world_size, 0.0))
