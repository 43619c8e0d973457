"""What the owner of a generation is told: facts from outside, and how its errands ended.

Each comes once and in the order in which it was posted; an errand ends with exactly one of the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.faults.causes import Cause
    from trainium_contract.wire.messages import StepTiming, StuckRank
    from trainium_trainer.agent.exits.restart_policy import GenerationState


class Order(IntEnum):
    """How the agent is told to leave a generation; a higher one overrides a lower one."""

    NONE = 0
    GRACEFUL = 1
    """A newer generation; let the ranks save first."""
    TERMINATE = 2
    """The pod is ending; let the ranks save first."""
    IMMEDIATE = 3
    """A newer generation; kill the ranks."""


class GenerationEnd(StrEnum):
    """How a generation ended on this pod."""

    FINISHED = "Finished"
    """Every rank of every member ended with code 0."""
    LEFT = "Left"
    """As ordered; no rank is alive."""


# Facts.


@dataclass(frozen=True, slots=True)
class Begin:
    """Take part."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """Leave the generation."""

    order: Order
    superseded_by: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A local rank ended and was collected."""

    attempt: int
    local_rank: int
    rank: int
    code: int
    asked: bool
    """The agent had told it to end."""


@dataclass(frozen=True, slots=True)
class SharedChanged:
    """The agents' shared state is another."""

    state: GenerationState


@dataclass(frozen=True, slots=True)
class WaitingFor:
    """The rendezvous lacks these node ranks."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """It is later."""


Fact = Begin | Ordered | Ended | SharedChanged | WaitingFor | Tick


# How errands end.


@dataclass(frozen=True, slots=True)
class Joined:
    """Every member has joined the attempt of this state."""

    state: GenerationState
    port: int
    """Of the ranks' store, at node rank 0."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The rendezvous heard of the order to leave."""


@dataclass(frozen=True, slots=True)
class GenerationStopped:
    """The rendezvous found that another agent gave up for all."""


@dataclass(frozen=True, slots=True)
class FoundBad:
    """The pairwise test found this very node bad; the others know."""

    code: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Started:
    """So many local ranks were started."""

    ranks: int


@dataclass(frozen=True, slots=True)
class Judged:
    """What follows from the ends of an attempt's ranks."""

    local_rank: int
    """Whose end decided."""
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
    """The errand could not reach the generation's store."""

    reason: str


@dataclass(frozen=True, slots=True)
class Looked:
    """A look at the living ranks."""

    overdue: bool
    """One stands still for longer than it may."""
    timing: StepTiming | None = None


@dataclass(frozen=True, slots=True)
class Inquired:
    """This agent's part in an inquiry into a standstill."""

    open: bool
    """It waits for the others' answers."""
    stuck: tuple[StuckRank, ...] | None = None
    """What was seen of the own ranks; None where it did not look."""


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
class Counted:
    """A standstill that could not be talked about was counted, or had been by another agent."""

    after: GenerationState


@dataclass(frozen=True, slots=True)
class FinishLooked:
    """Whether every member has finished, and the agents have parted."""

    parted: bool


@dataclass(frozen=True, slots=True)
class YieldLooked:
    """The next attempt's state, when all have yielded and nobody calls; None while that is not so."""

    after: GenerationState | None


@dataclass(frozen=True, slots=True)
class ErrandDone:
    """Nothing more to say."""


Result = (
    Joined | Interrupted | GenerationStopped | FoundBad | Started | Judged | StoreLost | Looked | Inquired | HangFound
    | Counted | FinishLooked | YieldLooked | ErrandDone
)  # fmt: skip
Event = Fact | Result
