"""Decide when a stalled process is hung, and which rank is to blame: pure functions of observations.

A rank is stalled while its pulse does not change. How long it may be depends on what it does; the limit of a step
follows the job's step times. The rank to blame is decided from what all agents of the generation report.

Guarantees:
- Time passes only as observations pass, so an agent that was itself frozen sees no stall of its ranks.
- A rank that moves, saves, loads or compiles within its limit excuses all that wait for it.
- A rank that waits for its peers is a victim, never the culprit, unless a signal stopped it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from trainium_agent.exits.restart_policy import GenerationState, judge
from trainium_contract.exit_codes import ExitCode
from trainium_contract.status.results import RunStage
from trainium_contract.wire.messages import TrainerPhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainium_contract.spec.recovery import HangSpec

_LONGEST_SAMPLE_SECONDS = 2.0
"""Longest time that a sample adds to a standstill: a longer gap was the agent's own."""
_ENOUGH_STEPS = 3
_BUSY = 0.5
_FIRST_STEP_FLOORS = 4.0
_INIT_FLOORS = 8.0
_SHORTEST_RETRY_SECONDS = 0.25
_LONGEST_RETRY_SECONDS = 5.0
_STOPPED = ("T", "t")
_UNINTERRUPTIBLE = "D"
_STAGES = {RunStage.EXPORT: "writing artifacts", RunStage.EVALUATE: "evaluating"}
_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible system call",
    "Z": "dead, not collected",
}


@dataclass(frozen=True, slots=True)
class Usual:
    """The usual times of this job on this pod, in seconds."""

    steps: tuple[float, ...] = ()
    """Newest steps, without first ones."""
    first_step: float = 0.0
    """Longest first step at the present size; 0 for none yet."""
    init: float = 0.0
    """Longest start until loading; 0 for none yet."""


def limit_of(phase: TrainerPhase, spec: HangSpec, usual: Usual, *, state: str = "") -> float:
    """Return how long a rank may be stalled in a phase, in seconds; `state` is its letter in /proc, if known.

    What is stopped neither waits for storage nor compiles: it has no longer than in a step.
    """
    limit = _limit_of(phase, spec, usual)
    return min(limit, _limit_of(TrainerPhase.STEP, spec, usual)) if state in _STOPPED else limit


def _limit_of(phase: TrainerPhase, spec: HangSpec, usual: Usual) -> float:
    floor, factor = spec.step_floor_seconds, spec.step_factor
    match phase:
        case TrainerPhase.INIT:
            return min(spec.init_seconds, _calibrated(usual.init, _INIT_FLOORS * floor, factor))
        case TrainerPhase.COMPILE:
            return min(spec.compile_seconds, _calibrated(usual.first_step, _FIRST_STEP_FLOORS * floor, factor))
        case TrainerPhase.LOAD:
            return spec.load_seconds
        case TrainerPhase.SAVE:
            return spec.save_seconds
        case TrainerPhase.STEP:
            known = usual.steps if len(usual.steps) >= _ENOUGH_STEPS else (*usual.steps, usual.first_step)
            return max(floor, factor * percentile(known, 0.99))


def _calibrated(usual: float, floor: float, factor: float) -> float:
    """Return a limit by experience; infinite while there is none."""
    return max(floor, factor * usual) if usual > 0 else math.inf


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class RankSample:
    """One look at one living rank."""

    rank: int
    sign: tuple[int, int]
    """Changes with every sign of life."""
    phase: TrainerPhase
    step: int
    """Last step that it completed."""
    limit: float
    """Seconds that it may be stalled in this phase."""
    waiting: bool | None
    """By its own account; None when its work has collectives inside."""
    state: str = ""
    """Letter of /proc; empty when it was not asked."""
    cpu_seconds: float = 0.0
    stage: RunStage = RunStage.TRAIN
    unreported: bool = False
    """It is a rank of a program that has reported nothing."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The stall of one rank."""

    rank: int
    phase: TrainerPhase
    step: int
    seconds: float
    limit: float
    waiting: bool | None
    state: str = ""
    busy: float = 0.0
    """Processor time per second of the standstill."""
    stage: RunStage = RunStage.TRAIN
    """Stage of the run: steps, or one after the last step."""
    unreported: bool = False
    """It is a rank of a program that has reported nothing, so it excuses no rank that has."""

    @property
    def overdue(self) -> bool:
        """Return whether it is stalled for longer than it may be."""
        return self.seconds >= self.limit

    @property
    def stopped(self) -> bool:
        """A signal or a debugger holds it."""
        return self.state in _STOPPED

    @property
    def waits(self) -> bool | None:
        """Return whether it waits for its peers; None where that is unknown."""
        if self.stopped:
            return False
        if self.waiting is None and (self.state == _UNINTERRUPTIBLE or self.busy >= _BUSY):
            return False
        return self.waiting


class StallWatch:
    """Adds up standstills over successive observations of the ranks of one pod."""

    def __init__(self) -> None:
        self._sampled_at: float | None = None
        self._still: dict[int, _Still] = {}

    def sample(self, now: float, samples: Iterable[RankSample]) -> tuple[Stall, ...]:
        """Return the stall of each rank that is seen; `now` is monotonic."""
        passed = 0.0 if self._sampled_at is None else min(max(0.0, now - self._sampled_at), _LONGEST_SAMPLE_SECONDS)
        self._sampled_at = now
        before, self._still = self._still, {}
        found = []
        for sample in samples:
            known = before.get(sample.rank)
            if known is None or known.sign != sample.sign:
                known = _Still(sample.sign)
            else:
                known = replace(known, seconds=known.seconds + passed)
            if known.cpu_at is None and sample.state:
                known = replace(known, cpu_at=(sample.cpu_seconds, known.seconds))
            self._still[sample.rank] = known
            found.append(_standstill(sample, known))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Still:
    sign: tuple[int, int]
    seconds: float = 0.0
    cpu_at: tuple[float, float] | None = None
    """Processor time, and the length of the standstill, when /proc was first asked."""


def _standstill(sample: RankSample, known: _Still) -> Stall:
    busy = 0.0
    if known.cpu_at is not None and sample.state:
        cpu, since = known.cpu_at
        busy = (sample.cpu_seconds - cpu) / (known.seconds - since) if known.seconds > since else 0.0
    return Stall(
        rank=sample.rank,
        phase=sample.phase,
        step=sample.step,
        seconds=round(known.seconds, 3),
        limit=round(min(sample.limit, 1e9), 3),
        waiting=sample.waiting,
        state=sample.state,
        busy=round(max(0.0, busy), 3),
        stage=sample.stage,
        unreported=sample.unreported,
    )


class FindingKind(StrEnum):
    """The kinds of findings."""

    MOVING = "Moving"
    """Nothing is wrong, or somebody still has time."""
    STUCK = "Stuck"
    """Single ranks are to blame."""
    COLLECTIVE = "Collective"
    """All wait, or all stand alike: nobody is odd."""
    SILENT = "Silent"
    """All agents that answer wait, and some agents do not answer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to a standstill."""

    kind: FindingKind
    culprits: tuple[int, ...] = ()
    """Ranks."""
    silent: tuple[int, ...] = ()
    """Node ranks that did not answer."""
    retry_seconds: float = 0.0
    """When to look again, if anybody is overdue and excused; 0: not before somebody else is."""

    def encode(self) -> str:
        """Return the value as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Finding:
        """Decode the text of the same generation's agents."""
        body = json.loads(text)
        return Finding(FindingKind(body["kind"]), tuple(body["culprits"]), tuple(body["silent"]), body["retry_seconds"])


def find(answers: Mapping[int, Sequence[Stall]], members: int) -> Finding:
    """Find the ranks to blame from each agent's report (by node rank) about all its living ranks."""
    ranks = [rank for node in answers.values() for rank in node]
    overdue = [rank for rank in ranks if rank.overdue]
    if not overdue:
        return Finding(FindingKind.MOVING)
    known = [rank for rank in ranks if not rank.unreported] or ranks
    # Where some ranks of a program report nothing, nobody knows who waits for whom.
    odd = _odd_ones(overdue, ranks) if known == ranks else [rank for rank in ranks if rank.stopped]
    if odd:
        return Finding(FindingKind.STUCK, culprits=tuple(sorted(rank.rank for rank in odd)))
    with_time = [rank.limit - rank.seconds for rank in known if not rank.overdue]
    if with_time:
        retry = min(max(min(with_time), _SHORTEST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS)
        return Finding(FindingKind.MOVING, retry_seconds=retry)
    silent = tuple(sorted(set(range(members)) - set(answers)))
    if silent:
        return Finding(FindingKind.SILENT, silent=silent)
    return Finding(FindingKind.COLLECTIVE)


def _odd_ones(overdue: list[Stall], ranks: list[Stall]) -> list[Stall]:
    """Return the overdue ranks that differ from the rest; none when all stand alike, or may do so in a moment."""
    stopped = [rank for rank in overdue if rank.stopped]
    if stopped:
        return stopped
    alone = len(ranks) == 1
    odd = [rank for rank in overdue if rank.waits is False]
    if odd:
        phases = {rank.phase for rank in odd}
        likely = [rank for rank in ranks if not rank.overdue and rank.waits is False and rank.phase in phases]
        about_to_join = any(rank.seconds > rank.limit / 2 for rank in likely)
        return odd if alone or (len(odd) < len(ranks) and not about_to_join) else []
    odd = [rank for rank in overdue if rank.waits is None]
    others_wait = all(rank.overdue and rank.waits for rank in ranks if rank not in odd)
    return odd if alone or (others_wait and len(odd) < len(ranks)) else []


def after_hang(finding: Finding, attempt: int, best_step: float, state: GenerationState, limit: int) -> GenerationState:
    """Return the shared state after the ranks of `attempt` were ended for a standstill; counts once, as any failure."""
    after = judge(ExitCode.HUNG, attempt, best_step, state, limit).state
    if after.attempt > state.attempt and finding.kind is FindingKind.COLLECTIVE:
        return replace(after, unexplained=after.unexplained + 1)
    return after


def describe(still: Stall, pod: str) -> str:
    """Describe a stall in a sentence without its full stop."""
    waiting_words = {
        True: "waiting for its peers",
        False: "not waiting for peers",
        None: "in work that has collectives inside",
    }
    notes = [waiting_words[still.waits], *([_STATES[still.state]] if still.state in _STATES else [])]
    if still.busy >= _BUSY:
        notes.append(f"using {still.busy:.0%} of a processor")
    return f"rank {still.rank} of pod {pod} stood still for {still.seconds:.0f} s {_where(still)} ({', '.join(notes)})"


def _where(still: Stall) -> str:
    if still.stage is not RunStage.TRAIN:
        return f"while {_STAGES[still.stage]} after step {max(still.step, 0)}"
    match still.phase:
        case TrainerPhase.STEP:
            return f"in step {still.step + 1}"
        case TrainerPhase.COMPILE:
            return f"in step {max(still.step, 0) + 1}, its first"
        case TrainerPhase.SAVE:
            return f"while saving after step {max(still.step, 0)}"
        case TrainerPhase.LOAD:
            return "while loading its state"
        case TrainerPhase.INIT:
            return "while starting"


def encode(standstills: Sequence[Stall]) -> str:
    """Encode an agent's answer about its ranks."""
    return json.dumps([asdict(still) for still in standstills])


def decode(text: str) -> tuple[Stall, ...]:
    """Decode the text of the same generation's agents."""
    return tuple(_standstill_of(body) for body in json.loads(text))


def _standstill_of(body: dict[str, Any]) -> Stall:
    known = {name: body[name] for name in Stall.__dataclass_fields__ if name in body}
    return Stall(**{**known, "phase": TrainerPhase(body["phase"]), "stage": RunStage(body["stage"])})


@dataclass(slots=True)
class Calibration:
    """Longest starts and first steps of this pod, by world size (another size compiles other graphs)."""

    _first_steps: dict[int, float] = field(default_factory=dict)
    _inits: dict[int, float] = field(default_factory=dict)

    def note_first_step(self, world: int, seconds: float) -> None:
        """Record the length of a first step."""
        self._first_steps[world] = max(seconds, self._first_steps.get(world, 0.0))

    def note_init(self, world: int, seconds: float) -> None:
        """Record the length of an initialization."""
        self._inits[world] = max(seconds, self._inits.get(world, 0.0))

    def usual(self, world: int, steps: tuple[float, ...]) -> Usual:
        """Return the usual times at this size."""
        return Usual(steps, self._first_steps.get(world, 0.0), self._inits.get(world, 0.0))
