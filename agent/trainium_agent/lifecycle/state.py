"""Define the state of a generation on one pod, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_agent.lifecycle.events import GenerationOutcome, Order

if TYPE_CHECKING:
    from trainium_agent.lifecycle import actions, events


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """The limits of a generation."""

    generation: int
    grace_seconds: float
    """Time for the ranks to save and exit."""
    sample_seconds: float
    """Seconds between two observations of living ranks."""


class Stage(StrEnum):
    """The stages of a generation on this pod."""

    NEW = "New"
    JOINING = "Joining"
    STARTING = "Starting"
    RUNNING = "Running"
    KILLING = "Killing"
    """The ranks are being killed."""
    KILLED = "Killed"
    """No rank is alive; `follow_up` follows when none of the processes that they started is."""
    DIAGNOSING = "Diagnosing"
    STORE_LOST = "StoreLost"
    """A task will be retried soon."""
    BACKOFF = "Backoff"
    YIELDED = "Yielded"
    FINISHED = "Finished"
    FAILED = "Failed"
    """The pod gave up and waits for a newer generation or its end."""
    SAVING = "Saving"
    """The ranks save and exit, as ordered."""
    ENDED = "Ended"


class SimpleFollowUp(StrEnum):
    """Actions when no process of the attempt is left, without arguments."""

    REJOIN = "Rejoin"
    """Join the next attempt."""
    DIAGNOSE_EXITS = "DiagnoseExits"
    """Diagnose the unrequested exits."""
    LEAVE = "Leave"
    """End the generation."""


@dataclass(frozen=True, slots=True)
class CountHang:
    """Count a hang without an inquiry, because the store was lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up with this verdict; None if another agent stopped the generation."""

    verdict: actions.ReportVerdict | None = None


FollowUp = SimpleFollowUp | CountHang | Fail


@dataclass(frozen=True, slots=True)
class LocalGeneration:
    """The state of a generation on this pod."""

    limits: GenerationLimits
    stage: Stage = Stage.NEW
    attempt: int = 0
    started: int = 0
    """Local ranks of the newest attempt that was started."""
    exits: tuple[events.RankExited, ...] = ()
    """Local ranks that have ended."""
    pending: tuple[events.RankExited | events.SharedStateChanged, ...] = ()
    """Events that have not been handled yet."""
    running_task: actions.Task | None = None
    order: Order = Order.NONE
    superseded_by: int = 0
    follow_up: FollowUp | None = None
    """Action when no process of the attempt is left."""
    retry: actions.DiagnoseExits | actions.SimpleTask | None = None
    deadline: float = 0.0
    """When the stage continues or is abandoned; monotonic seconds, as all times here."""
    next_sample_at: float = 0.0
    overdue: bool = False
    """Whether a rank is stalled beyond its limit."""
    has_open_inquiry: bool = False
    """Whether this agent waits for answers to an inquiry."""
    answered: int = 0
    """Number of the newest answered inquiry."""
    stuck_reported_at: float | None = None
    """When a stall was last reported."""
    entered_barrier: bool = False
    broken_announced: bool = False
    outcome: GenerationOutcome = GenerationOutcome.LEFT

    @property
    def alive(self) -> bool:
        """Whether any rank has not ended."""
        return self.started > len(self.exits)
