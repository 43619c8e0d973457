"""Define the inputs of a generation's state machine: external events, and results of its tasks.

Each arrives once, in the order in which it was posted; a task ends with exactly one result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_agent.exits.restart_policy import GenerationState
    from trainium_agent.workload.master_port import MasterPort
    from trainium_contract.faults.causes import Cause
    from trainium_contract.wire.messages import StepTiming, StuckRank


class Order(IntEnum):
    """Orders to leave a generation; a higher one overrides a lower one."""

    NONE = 0
    GRACEFUL = 1
    """A newer generation came; let the ranks save first."""
    TERMINATE = 2
    """The pod is ending; let the ranks save first."""
    IMMEDIATE = 3
    """A newer generation came; kill the ranks."""


class GenerationOutcome(StrEnum):
    """The ways in which a generation ends on this pod."""

    FINISHED = "Finished"
    """Every rank of every member ended with code 0."""
    LEFT = "Left"
    """The pod left as ordered; no rank is alive."""


# External events.


class SimpleEvent(StrEnum):
    """Events without arguments."""

    BEGIN = "Begin"
    """Start this pod's part."""
    TICK = "Tick"
    """A time of `wake_at` has come."""


@dataclass(frozen=True, slots=True)
class LeaveOrdered:
    """The pod is ordered to leave the generation."""

    order: Order
    superseded_by: int = 0


@dataclass(frozen=True, slots=True)
class RankExited:
    """A local rank ended and was reaped."""

    attempt: int
    local_rank: int
    rank: int
    code: int
    requested: bool
    """Whether the agent had requested the end."""


@dataclass(frozen=True, slots=True)
class SharedStateChanged:
    """The shared state of the agents changed."""

    state: GenerationState


@dataclass(frozen=True, slots=True)
class WaitingForNodes:
    """The rendezvous waits for these node ranks."""

    nodes: tuple[int, ...]


ExternalEvent = SimpleEvent | LeaveOrdered | RankExited | SharedStateChanged | WaitingForNodes


# Results of tasks.


class SimpleResult(StrEnum):
    """Results without arguments."""

    INTERRUPTED = "Interrupted"
    """An order to leave interrupted the rendezvous."""
    STOPPED = "Stopped"
    """Another agent stopped the generation."""
    DONE = "Done"


@dataclass(frozen=True, slots=True)
class Unkillable:
    """Processes that did not end after SIGKILL."""

    names: str


@dataclass(frozen=True, slots=True)
class AttemptJoined:
    """Every member has joined the attempt of this state."""

    state: GenerationState
    port: MasterPort


@dataclass(frozen=True, slots=True)
class PodGaveUp:
    """This pod gave up in place, because of its node or the program, and has notified the others."""

    code: int
    sentence: str


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """The local ranks were started."""

    ranks: int


@dataclass(frozen=True, slots=True)
class ExitsDiagnosed:
    """The decision about the ends of an attempt's ranks."""

    local_rank: int
    """Local rank whose end determined the decision."""
    rank: int
    code: int
    cause: Cause
    sentence: str
    ended_at: float
    """Unix seconds."""
    withdraw: bool
    backoff_seconds: float
    state: GenerationState


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The task could not reach the generation's store."""

    reason: str


@dataclass(frozen=True, slots=True)
class RanksSampled:
    """The living ranks were sampled."""

    overdue: bool
    """Whether a rank is stalled beyond its limit."""
    timing: StepTiming | None = None


@dataclass(frozen=True, slots=True)
class InquiryUpdated:
    """This agent's part in an inquiry into stalled ranks changed."""

    open: bool
    """Whether this agent waits for answers."""
    stuck: tuple[StuckRank, ...] | None = None
    """Stuck ranks of this pod; None if they were not sampled."""


@dataclass(frozen=True, slots=True)
class HangFound:
    """The agents have found that the attempt hangs."""

    state: GenerationState
    cause: Cause
    """Cause of the restart, from this pod's view."""
    failed_at: float
    """Unix seconds."""
    culprit_known: bool
    """Whether a rank is to blame."""
    culprits: tuple[tuple[int, str], ...] = ()
    """Ranks of this pod that are to blame, each with a sentence."""
    stuck: tuple[StuckRank, ...] = ()


@dataclass(frozen=True, slots=True)
class HangCounted:
    """A hang without an inquiry was counted, by this agent or another."""

    state: GenerationState


@dataclass(frozen=True, slots=True)
class FinishChecked:
    """The exit barrier was checked: whether every member has finished."""

    all_finished: bool


@dataclass(frozen=True, slots=True)
class YieldChecked:
    """The state of the next attempt, once all yielded and no newer generation was published; None before."""

    state: GenerationState | None


Result = (
    SimpleResult | Unkillable | AttemptJoined | PodGaveUp | RanksStarted | ExitsDiagnosed | StoreLost | RanksSampled
    | InquiryUpdated | HangFound | HangCounted | FinishChecked | YieldChecked
)  # fmt: skip
Event = ExternalEvent | Result
