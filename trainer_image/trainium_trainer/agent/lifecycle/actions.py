"""What the owner of a generation has done: errands and acts.

Errands block, so the worker does them, one after another. Acts take no time: the edge of the owner does them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.faults.causes import Cause
    from trainium_contract.wire.messages import StepTiming, StuckRank, WorkerPhase
    from trainium_trainer.agent.exits.restart_policy import GenerationState


# Errands.


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the other agents: Joined, Interrupted, GenerationStopped or FoundBad."""


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start the attempt's ranks from the standby: Started."""

    attempt: int
    port: int


@dataclass(frozen=True, slots=True)
class Judge:
    """Diagnose these ends and count the failure: Judged or StoreLost."""

    attempt: int
    local_ranks: tuple[int, ...]
    reconnect: bool = False


@dataclass(frozen=True, slots=True)
class CountSilent:
    """Count a standstill that the agents could not talk about: Counted or StoreLost."""

    attempt: int
    reconnect: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """Look at the living ranks: Looked."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask all agents about their ranks: Inquired or StoreLost."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AnswerQuestion:
    """Answer the question in this state: Inquired."""

    state: GenerationState


@dataclass(frozen=True, slots=True)
class Conclude:
    """Read the answers: Inquired, HangFound or StoreLost."""

    attempt: int


@dataclass(frozen=True, slots=True)
class TakeFinding:
    """Read what another agent concluded: HangFound."""

    attempt: int
    after: GenerationState


@dataclass(frozen=True, slots=True)
class SignOff:
    """Write down how the ranks of this pod ended: Done."""

    attempt: int
    phase: WorkerPhase


@dataclass(frozen=True, slots=True)
class Finish:
    """Part, if all have finished: FinishLooked."""

    attempt: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """Begin the next attempt, if all yielded and nobody calls: YieldLooked."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the others why this pod leaves: Done."""

    leaving: bool
    superseded_by: int


@dataclass(frozen=True, slots=True)
class TellBroken:
    """Tell those that save that a rank has died, so they need not wait for it: Done."""


Errand = (
    Join | StartRanks | Judge | CountSilent | Look | Ask | AnswerQuestion | Conclude | TakeFinding | SignOff | Finish
    | GoOn | Announce | TellBroken
)  # fmt: skip


# Acts.


@dataclass(frozen=True, slots=True)
class Do:
    """Give the worker this errand."""

    errand: Errand


@dataclass(frozen=True, slots=True)
class Hurry:
    """The errand that is under way, and those that follow, need not be finished: the pod leaves."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to every rank that has not ended."""


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """Finish the step, agree, save, leave with 75."""

    memory_ends: bool
    """This pod's memory goes with it."""


@dataclass(frozen=True, slots=True)
class Enter:
    """Report another phase."""

    phase: WorkerPhase
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class Restarting:
    """Report that a restart in place begins."""

    attempt: int
    cause: Cause
    failed_at: float | None
    """Unix seconds; None for now."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Report an end that nobody asked for."""

    local_rank: int


@dataclass(frozen=True, slots=True)
class Hung:
    """Report a rank that is ended for standing still."""

    rank: int
    sentence: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report a verdict: the failure of this rank, else the newest."""

    local_rank: int | None = None


@dataclass(frozen=True, slots=True)
class GiveUpWith:
    """Report a verdict on the node."""

    code: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Waits:
    """Report whom the rendezvous lacks."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Observe:
    """Read the ranks' progress once more."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """Report local ranks that stand still."""

    ranks: tuple[StuckRank, ...]


@dataclass(frozen=True, slots=True)
class Timed:
    """Report the step times."""

    timing: StepTiming | None


@dataclass(frozen=True, slots=True)
class Say:
    """A line of the log."""

    sentence: str
    severe: bool = False


@dataclass(frozen=True, slots=True)
class Break:
    """The pod cannot go on."""

    sentence: str


Action = (
    Do | Hurry | Kill | AskToLeave | Enter | Restarting | Failed | Hung | GiveUp | GiveUpWith | Waits | Observe | Stuck
    | Timed | Say | Break
)  # fmt: skip
