"""The typed values of one job: activity, progress, cost, recent events, and advice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_contract.views.events import EventView
    from trainium_contract.views.goodput import GoodputView
    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.status_reader import StatusReader
    from trainium_contract.views.workers import WorkersView

STALE_SECONDS = 15.0
"""Age from which the status of a training job is stale: three intervals of the operator, which grow with the job."""
_EVERY_INTERVAL_WORKERS = 256
_MAX_INTERVAL_FACTOR = 6.0
_UNCHANGED_SECONDS = 120.0
"""Time without a new step, or without a change of a waiting job, that a reader should know of."""


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
    """An artifact of the run."""

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
    standard_error: float | None = None
    """Standard error of `after`."""


@dataclass(frozen=True, slots=True)
class MilestoneView:
    """The figures of a milestone's model, or why there are none."""

    step: int
    tokens: int
    figures: tuple[FigureView, ...]
    message: str


@dataclass(frozen=True, slots=True)
class RoleView:
    """Pods of a role of the job."""

    name: str
    ready: int
    replicas: int
    min_ready: int
    restarts: int
    message: str
    """Why fewer pods than requested are ready; empty otherwise."""


@dataclass(frozen=True, slots=True)
class AlertView:
    """An alert of the trainer's monitors."""

    kind: str
    step: int
    message: str

    @property
    def text(self) -> str:
        """Return the message with its step, which most messages start with."""
        return self.message if self.message.startswith(f"Step {self.step}") else f"step {self.step}: {self.message}"


@dataclass(frozen=True, slots=True)
class ChangeView:
    """A field of a failed job that was changed since; empty if not set."""

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
class JobView:
    """The screen of `status`."""

    name: str
    namespace: str
    uid: str
    model: str
    managed_by: str
    """Another controller of the job; empty for this operator."""
    phase: str
    """Empty until an operator has answered the job."""
    stage: str
    stage_share: float | None
    age_seconds: float | None
    started_at: float | None
    """Unix seconds of the first step."""
    ended_at: float | None
    """Unix seconds when it completed or failed."""
    step: int
    step_reported_at: float | None
    """Unix seconds; None if unknown."""
    step_age_seconds: float | None
    total_steps: int
    share: float | None
    """Share of the steps, 0 to 1."""
    eta_seconds: float | None
    """Time until the last step, at the reference step time and with the lost time so far."""
    step_seconds: float | None
    loss: float | None
    reward_accuracy: float | None
    learning_rate: float | None
    grad_norm: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
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
    """Differences from the spec that failed; None if unknown, and for a job that has not failed."""
    conditions: tuple[ConditionView, ...]
    alerts: tuple[AlertView, ...]
    artifacts: tuple[ArtifactView, ...]
    evaluation: tuple[FigureView, ...]
    evaluations: tuple[MilestoneView, ...]
    roles: tuple[RoleView, ...]
    workers: WorkersView | None
    last: InterruptionView | None
    events: tuple[EventView, ...]
    """The newest first."""
    advice: tuple[str, ...]
    outdated: bool
    """Whether the operator has not answered the newest spec yet."""
    written_seconds_ago: float | None
    written_at: float | None
    """Unix seconds; None for a status that was never written."""
    not_shown: tuple[str, ...]
    """Objects that could not be read, with the reasons."""
    status: StatusReader[PublicStatus] = field(repr=False, compare=False, metadata={"json": False})
    """For `pages/facts.py`: fields without one here."""

    @property
    def ended(self) -> bool:
        """Return whether the job has completed or failed."""
        return self.phase in {"Completed", "Failed"}

    @property
    def has_known_checkpoints(self) -> bool:
        """Return whether the checkpoints can be known: not those of a program that does not describe them."""
        return all(condition.reason != "CheckpointsUnknown" for condition in self.conditions)

    @property
    def step_is_old(self) -> bool:
        """Return whether a training job has reported no step for long, so that a reader needs the step's age."""
        expected = not self.ended and self.phase not in {"", "Suspended"} and not self.managed_by
        return expected and self.step > 0 and (self.step_age_seconds or 0.0) > _UNCHANGED_SECONDS

    @property
    def stale(self) -> bool:
        """Return whether a training job's status is old although progress is written at intervals.

        A waiting job does not count, because an unchanged status is not written again.
        """
        intervals = min(_MAX_INTERVAL_FACTOR, max(1.0, self.desired / _EVERY_INTERVAL_WORKERS))
        return self.phase == "Running" and self._is_older_than(STALE_SECONDS * intervals)

    @property
    def is_waiting_stale(self) -> bool:
        """Return whether a waiting job has an old status: nothing has changed, or no operator writes it."""
        waits = self.phase not in {"", "Running", "Suspended"} and not self.ended
        return waits and self._is_older_than(_UNCHANGED_SECONDS)

    def _is_older_than(self, seconds: float) -> bool:
        written = self.written_seconds_ago
        return not self.managed_by and written is not None and written >= seconds
