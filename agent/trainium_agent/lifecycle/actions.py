"""The outputs of a generation's state machine: tasks and actions.

Tasks block, so the worker runs them, one after another. Actions take no time: the runner carries them out at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_agent.exits.restart_policy import GenerationState
    from trainium_contract.faults.causes import Cause
    from trainium_contract.wire.messages import StepTiming, StuckRank, WorkerPhase


# Tasks, all of the present attempt.


class SimpleTask(StrEnum):
    """Tasks without details, and their results."""

    JOIN = "Join"
    """Meet the other agents: Joined, INTERRUPTED, STOPPED or GaveUp."""
    COUNT_UNANSWERED_HANG = "CountUnansweredHang"
    """Count a standstill that the agents could not talk about: HangCounted or StoreLost."""
    SAMPLE_RANKS = "SampleRanks"
    """Look at the living ranks: RanksSampled."""
    OPEN_INQUIRY = "OpenInquiry"
    """Ask all agents about their ranks: InquiryUpdated or StoreLost."""
    CONCLUDE_INQUIRY = "ConcludeInquiry"
    """Read the answers: InquiryUpdated, HangFound or StoreLost."""
    CHECK_FINISHED = "CheckFinished"
    """Part, if all have finished: FinishChecked."""
    CHECK_YIELDED = "CheckYielded"
    """Begin the next attempt, if all yielded and nobody calls: YieldChecked."""
    ANNOUNCE_BROKEN = "AnnounceBroken"
    """Publish that a rank has died, so that those that save need not wait for it: DONE."""


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start the attempt's ranks from the standby: Started."""

    port: int


@dataclass(frozen=True, slots=True)
class DiagnoseEnds:
    """Diagnose these ends and count the failure: EndsDiagnosed or StoreLost."""

    local_ranks: tuple[int, ...]
    reconnect: bool = False


@dataclass(frozen=True, slots=True)
class AnswerQuestion:
    """Answer the question in this state: InquiryUpdated."""

    state: GenerationState


@dataclass(frozen=True, slots=True)
class ReadFinding:
    """Read what another agent concluded: HangFound."""

    after: GenerationState


@dataclass(frozen=True, slots=True)
class SignExit:
    """Write down how the ranks of this pod ended: DONE."""

    phase: WorkerPhase


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish why this pod leaves: DONE."""

    leaving: bool
    superseded_by: int


Task = SimpleTask | StartRanks | DiagnoseEnds | AnswerQuestion | ReadFinding | SignExit | Announce


# Acts.


class SimpleAction(StrEnum):
    """Actions without details."""

    INTERRUPT_TASK = "InterruptTask"
    """The task that is under way, and those that follow, need not be finished: the pod leaves."""
    KILL = "Kill"
    """SIGKILL to every rank that has not ended."""
    OBSERVE_PROGRESS = "ObserveProgress"
    """Read the ranks' progress once more."""


@dataclass(frozen=True, slots=True)
class RunTask:
    """Give the worker this task."""

    task: Task


@dataclass(frozen=True, slots=True)
class RequestExit:
    """Finish the step, agree, save, leave with 75."""

    memory_ends: bool
    """This pod's memory goes with it."""


@dataclass(frozen=True, slots=True)
class EnterPhase:
    """Report another phase."""

    phase: WorkerPhase
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class ReportRestart:
    """Report that a restart in place begins."""

    attempt: int
    cause: Cause
    failed_at: float | None
    """Unix seconds; None for now."""


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Report an end that nobody asked for."""

    local_rank: int


@dataclass(frozen=True, slots=True)
class ReportHang:
    """Report a rank that is ended for stalled still."""

    rank: int
    sentence: str


@dataclass(frozen=True, slots=True)
class ReportVerdict:
    """Report a verdict: the failure of this rank, else the newest."""

    local_rank: int | None = None


@dataclass(frozen=True, slots=True)
class ReportNodeVerdict:
    """Report a verdict on the node."""

    code: int
    sentence: str


@dataclass(frozen=True, slots=True)
class ReportWaiting:
    """Report whom the rendezvous lacks."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportStuck:
    """Report local ranks that are stalled."""

    ranks: tuple[StuckRank, ...]


@dataclass(frozen=True, slots=True)
class ReportTiming:
    """Report the step times."""

    timing: StepTiming | None


@dataclass(frozen=True, slots=True)
class Log:
    """A line of the log."""

    sentence: str
    severe: bool = False


@dataclass(frozen=True, slots=True)
class FailPod:
    """The pod cannot go on."""

    sentence: str


Action = (
    SimpleAction | RunTask | RequestExit | EnterPhase | ReportRestart | ReportFailure | ReportHang | ReportVerdict
    | ReportNodeVerdict | ReportWaiting | ReportStuck | ReportTiming | Log | FailPod
)  # fmt: skip
