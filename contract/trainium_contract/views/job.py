"""One job on one screen: what it does, how far it is, what it costs, what happened last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.views.events import EventView
    from trainium_contract.views.goodput import GoodputView
    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.workers import WorkersView

STALE_SECONDS = 120.0
"""Nobody has written of a job that trains for so long: six times the longest interval of the operator."""


@dataclass(frozen=True, slots=True)
class ConditionView:
    """One condition."""

    type: str
    status: str
    reason: str
    message: str
    age_seconds: float | None


@dataclass(frozen=True, slots=True)
class ArtifactView:
    """Something that the run left for others."""

    kind: str
    path: str
    step: int
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class FigureView:
    """A measure of the evaluation, before and after."""

    name: str
    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class AlertView:
    """What the trainer's monitors told."""

    kind: str
    step: int
    message: str

    @property
    def told(self) -> str:
        """The message with its step, which most begin with themselves."""
        return self.message if self.message.startswith(f"Step {self.step}") else f"step {self.step}: {self.message}"


@dataclass(frozen=True, slots=True)
class ChangeView:
    """A field of a failed job that was changed since; empty for not set."""

    field: str
    was: str
    now: str


@dataclass(frozen=True, slots=True)
class CheckpointsView:
    """Newest steps that a resume could use; None for none."""

    memory_step: int | None
    durable_step: int | None
    durable_age_seconds: float | None
    notice: str


@dataclass(frozen=True, slots=True)
class JobScreen:
    """The screen of `status`."""

    name: str
    namespace: str
    uid: str
    model: str
    managed_by: str
    """Who else controls the job; empty for the operator."""
    phase: str
    """Empty while no operator has answered the job."""
    stage: str
    stage_share: float | None
    age_seconds: float | None
    started_at: float | None
    """Unix seconds of the first step."""
    ended_at: float | None
    """Unix seconds when it completed or failed."""
    step: int
    total_steps: int
    share: float | None
    """Of the steps, 0 to 1."""
    eta_seconds: float | None
    """Until the last step, at the reference step time and with the losses that the run has had."""
    step_seconds: float | None
    loss: float | None
    tokens_per_second: float | None
    size: int
    training: int
    requested: int
    desired: int
    spares: int
    data_parallel: int
    generation: int
    attempt: int
    checkpoints: CheckpointsView
    goodput: GoodputView
    restarts: int
    restarts_by_cause: dict[str, float]
    verdict: str
    changes: tuple[ChangeView, ...] | None
    """What differs from the spec that failed; None where that is not known, and of a job that has not failed."""
    conditions: tuple[ConditionView, ...]
    alerts: tuple[AlertView, ...]
    artifacts: tuple[ArtifactView, ...]
    evaluation: tuple[FigureView, ...]
    workers: WorkersView | None
    last: InterruptionView | None
    events: tuple[EventView, ...]
    """The newest first."""
    advice: tuple[str, ...]
    outdated: bool
    """The operator has not answered the newest spec yet."""
    written_seconds_ago: float | None
    not_shown: tuple[str, ...]
    """What could not be read, and why."""

    @property
    def ended(self) -> bool:
        """Completed or failed."""
        return self.phase in {"Completed", "Failed"}

    @property
    def stale(self) -> bool:
        """A job that trains and of which nobody has written for long."""
        written = self.written_seconds_ago
        watched = not self.ended and self.phase != "Suspended" and not self.managed_by
        return watched and written is not None and written > STALE_SECONDS
