"""The state of a generation on one pod, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_agent.lifecycle.events import GenerationEnd, Order

if TYPE_CHECKING:
    from trainium_agent.lifecycle import actions as do
    from trainium_agent.lifecycle import events as on


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """The limits of a generation."""

    generation: int
    grace_seconds: float
    """For the ranks to save and leave."""
    sample_seconds: float
    """Seconds between two observations of living ranks."""


class Stage(StrEnum):
    """Where a generation is on this pod."""

    NEW = "New"
    JOINING = "Joining"
    STARTING = "Starting"
    RUNNING = "Running"
    ENDING = "Ending"
    """The ranks are killed; what follows does so when none is left."""
    JUDGING = "Judging"
    STORE_LOST = "StoreLost"
    """An task is tried again soon."""
    BACKOFF = "Backoff"
    YIELDED = "Yielded"
    FINISHED = "Finished"
    FAILED = "Failed"
    """Gave up; a newer generation or the end of the pod is awaited."""
    SAVING = "Saving"
    """The ranks save and leave, as ordered."""
    OVER = "Over"


class Then(StrEnum):
    """Name what follows when no rank is left, without details."""

    JOIN_AGAIN = "JoinAgain"
    """The next attempt."""
    JUDGE_ENDS = "JudgeEnds"
    """Find out what follows from ends that nobody asked for."""
    LEAVE_NOW = "LeaveNow"
    """The generation is over."""


@dataclass(frozen=True, slots=True)
class CountHang:
    """Count a standstill alone, since the store was lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up, with this verdict; None where another agent did."""

    verdict: do.ReportVerdict | None = None


After = Then | CountHang | Fail


@dataclass(frozen=True, slots=True)
class LocalGeneration:
    """All that is known of the generation on this pod."""

    stage: Stage = Stage.NEW
    attempt: int = 0
    started: int = 0
    """Local ranks of the newest attempt that was started."""
    ends: tuple[on.RankEnded, ...] = ()
    """Those that have ended."""
    pending: tuple[on.RankEnded | on.SharedChanged, ...] = ()
    """Events that no decision has answered yet."""
    busy: do.Task | None = None
    order: Order = Order.NONE
    superseded_by: int = 0
    after: After | None = None
    """Action when no rank is left."""
    retry: do.DiagnoseEnds | do.SimpleTask | None = None
    deadline: float = 0.0
    """When the stage goes on, or is given up; monotonic seconds, as all times here."""
    next_sample_at: float = 0.0
    overdue: bool = False
    """A rank is stalled for too long."""
    inquiring: bool = False
    """This agent waits for answers about a standstill."""
    answered: int = 0
    """Newest question that was answered."""
    stuck_reported_at: float | None = None
    """When a standstill was reported last."""
    signed: bool = False
    broken_announced: bool = False
    outcome: GenerationEnd = GenerationEnd.LEFT
    yielded: bool = False
    """The ranks ended with code 75 when this pod left."""

    @property
    def alive(self) -> bool:
        """Whether any rank has not ended."""
        return self.started > len(self.ends)

    def all_ended_with(self, code: int) -> bool:
        """Return whether there were ranks and each of them ended with this code."""
        return self.started > 0 and not self.alive and all(end.code == code for end in self.ends)
