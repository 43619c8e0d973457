"""Define the outputs of a generation's state machine: tasks and actions.

Tasks block, so the worker thread runs them one after another. Actions do not block: the runner performs them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_agent.exits.restart_policy import GenerationState
    from trainium_agent.workload.master_port import MasterPort
    from trainium_contract.faults.causes import Cause
    from trainium_contract.wire.messages import StepTiming, StuckRank, WorkerPhase


# Tasks of the current attempt.


class SimpleTask(StrEnum):
    """Tasks without arguments, each with its possible results."""

    JOIN = "Join"
    """Join the other agents: AttemptJoined, INTERRUPTED, STOPPED or PodGaveUp."""
    COUNT_UNANSWERED_HANG = "CountUnansweredHang"
    """Count a hang without an inquiry, because the store was lost: HangCounted or StoreLost."""
    SAMPLE_RANKS = "SampleRanks"
    """Sample the living ranks: RanksSampled."""
    OPEN_INQUIRY = "OpenInquiry"
    """Ask all agents about their ranks: InquiryUpdated or StoreLost."""
    CONCLUDE_INQUIRY = "ConcludeInquiry"
    """Read the answers: InquiryUpdated, HangFound or StoreLost."""
    CHECK_FINISHED = "CheckFinished"
    """Leave the exit barrier if all have finished: FinishChecked."""
    CHECK_YIELDED = "CheckYielded"
    """Start the next attempt if all yielded and no newer generation came: YieldChecked."""
    ANNOUNCE_BROKEN = "AnnounceBroken"
    """Publish that a rank has died, so that ranks that save need not wait for it: DONE."""
    END_LEFTOVERS = "EndLeftovers"
    """End every process that the ended ranks have started: DONE or Unkillable."""


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start the attempt's ranks from the standby: RanksStarted."""

    port: MasterPort


@dataclass(frozen=True, slots=True)
class DiagnoseExits:
    """Diagnose these ends and count the failure: ExitsDiagnosed or StoreLost."""

    local_ranks: tuple[int, ...]
    reconnect: bool = False


@dataclass(frozen=True, slots=True)
class AnswerInquiry:
    """Answer the inquiry in this state: InquiryUpdated."""

    state: GenerationState


@dataclass(frozen=True, slots=True)
class ReadFinding:
    """Read the finding of another agent: HangFound."""

    state: GenerationState


@dataclass(frozen=True, slots=True)
class EnterExitBarrier:
    """Record how the ranks of this pod ended: DONE."""

    phase: WorkerPhase


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish why this pod leaves: DONE."""

    leaving: bool
    superseded_by: int


Task = SimpleTask | StartRanks | DiagnoseExits | AnswerInquiry | ReadFinding | EnterExitBarrier | Announce


# Actions.


class SimpleAction(StrEnum):
    """Actions without arguments."""

    INTERRUPT_TASK = "InterruptTask"
    """Interrupt the running task and those that follow, because the pod leaves."""
    KILL = "Kill"
    """Send SIGKILL to every rank that has not ended."""
    OBSERVE_PROGRESS = "ObserveProgress"
    """Read the ranks' progress once more."""
    REPORT_GRACE_EXCEEDED = "ReportGraceExceeded"
    """Report that ranks are killed because they have not ended in the grace period."""


@dataclass(frozen=True, slots=True)
class RunTask:
    """Run this task in the worker thread."""

    task: Task


@dataclass(frozen=True, slots=True)
class RequestExit:
    """Ask the ranks to finish the step, agree, save and exit with 75."""

    memory_ends: bool
    """Whether the pod ends, and its memory tier with it."""


@dataclass(frozen=True, slots=True)
class EnterPhase:
    """Report another phase."""

    phase: WorkerPhase
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class ReportRestart:
    """Report that a restart in place starts."""

    attempt: int
    cause: Cause
    failed_at: float | None
    """Unix seconds; None for now."""


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Report an unrequested end of a rank."""

    local_rank: int


@dataclass(frozen=True, slots=True)
class ReportHang:
    """Report a rank that is ended because it hangs."""

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
    """Report the node ranks that the rendezvous waits for."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportStuck:
    """Report the stalled local ranks."""

    ranks: tuple[StuckRank, ...]


@dataclass(frozen=True, slots=True)
class ReportTiming:
    """Report the step times."""

    timing: StepTiming | None


@dataclass(frozen=True, slots=True)
class Log:
    """Write a line to the log."""

    sentence: str
    severe: bool = False


@dataclass(frozen=True, slots=True)
class FailPod:
    """End the pod, which cannot continue."""

    sentence: str


Action = (
    SimpleAction | RunTask | RequestExit | EnterPhase | ReportRestart | ReportFailure | ReportHang | ReportVerdict
    | ReportNodeVerdict | ReportWaiting | ReportStuck | ReportTiming | Log | FailPod
)  # fmt: skip
