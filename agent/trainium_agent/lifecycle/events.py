"""The inputs of a generation's state machine: facts from outside, and results of its tasks.

Each arrives once and in the order in which it was posted; a task ends with exactly one of the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_agent.exits.restart_policy import GenerationState
    from trainium_contract.faults.causes import Cause
    from trainium_contract.wire.messages import StepTiming, StuckRank


class Order(IntEnum):
    """The orders to leave a generation; a higher one overrides a lower one."""

    NONE = 0
    GRACEFUL = 1
    """A newer generation; let the ranks save first."""
    TERMINATE = 2
    """The pod is ending; let the ranks save first."""
    IMMEDIATE = 3
    """A newer generation; kill the ranks."""


class GenerationEnd(StrEnum):
    """The ends of a generation on this pod."""

    FINISHED = "Finished"
    """Every rank of every member ended with code 0."""
    LEFT = "Left"
    """As ordered; no rank is alive."""


# Facts.


class Notice(StrEnum):
    """Facts without details."""

    BEGIN = "Begin"
    """Take part."""
    TICK = "Tick"
    """It is later."""


@dataclass(frozen=True, slots=True)
class LeaveOrdered:
    """Leave the generation."""

    order: Order
    superseded_by: int = 0


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A local rank ended and was collected."""

    attempt: int
    local_rank: int
    rank: int
    code: int
    asked: bool
    """The agent had requested its end."""


@dataclass(frozen=True, slots=True)
class SharedChanged:
    """The agents' shared state is another."""

    state: GenerationState


@dataclass(frozen=True, slots=True)
class WaitingFor:
    """The rendezvous lacks these node ranks."""

    nodes: tuple[int, ...]


Fact = Notice | LeaveOrdered | RankEnded | SharedChanged | WaitingFor


# How tasks end.


class Outcome(StrEnum):
    """Results without details."""

    INTERRUPTED = "Interrupted"
    """The rendezvous was interrupted by the order to leave."""
    STOPPED = "Stopped"
    """The rendezvous found that another agent gave up for all."""
    DONE = "Done"


@dataclass(frozen=True, slots=True)
class Joined:
    """Every member has joined the attempt of this state."""

    state: GenerationState
    port: int
    """Of the ranks' store, at node rank 0."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """This pod gives up in place, because of its node or of the program; the others know."""

    code: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Started:
    """So many local ranks were started."""

    ranks: int


@dataclass(frozen=True, slots=True)
class EndsDiagnosed:
    """The decision about the ends of an attempt's ranks."""

    local_rank: int
    """Rank of this pod whose end decided."""
    rank: int
    code: int
    cause: Cause
    sentence: str
    ended_at: float
    """Unix seconds."""
    withdraw: bool
    backoff_seconds: float
    after: GenerationState


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The task could not reach the generation's store."""

    reason: str


@dataclass(frozen=True, slots=True)
class RanksSampled:
    """A look at the living ranks."""

    overdue: bool
    """One is stalled for longer than it may be."""
    timing: StepTiming | None = None


@dataclass(frozen=True, slots=True)
class InquiryUpdated:
    """This agent's part in an inquiry into a standstill."""

    open: bool
    """It waits for the others' answers."""
    stuck: tuple[StuckRank, ...] | None = None
    """Stuck ranks of this pod; None where it did not look."""


@dataclass(frozen=True, slots=True)
class HangFound:
    """The agents have found that the attempt hangs."""

    after: GenerationState
    cause: Cause
    """The restart's, to this pod."""
    failed_at: float
    """Unix seconds."""
    named: bool
    """A rank is to blame."""
    culprits: tuple[tuple[int, str], ...] = ()
    """Own ranks that are, each with a sentence."""
    stuck: tuple[StuckRank, ...] = ()


@dataclass(frozen=True, slots=True)
class HangCounted:
    """A standstill that could not be talked about was counted, or had been by another agent."""

    after: GenerationState


@dataclass(frozen=True, slots=True)
class FinishChecked:
    """The exit barrier was checked: whether every member has finished."""

    parted: bool


@dataclass(frozen=True, slots=True)
class YieldChecked:
    """The next attempt's state, when all have yielded and nobody calls; None while that is not so."""

    after: GenerationState | None


Result = (
    Outcome | Joined | GaveUp | Started | EndsDiagnosed | StoreLost | RanksSampled | InquiryUpdated | HangFound
    | HangCounted | FinishChecked | YieldChecked
)  # fmt: skip
Event = Fact | Result
