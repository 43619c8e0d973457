"""The interruptions of a job, from the operator's history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.rfc3339 import parse_rfc3339

if TYPE_CHECKING:
    from trainium_contract.status.interruptions import Interruption
    from trainium_contract.status.public import PublicStatus
    from trainium_contract.views.status_reader import StatusReader

STAGES = ("detect", "decide", "restart", "load", "compile", "replay")
"""Copy of `status.ledger.STAGES`, whose import takes longer than a command of the client."""
_LOSS_EXPLANATIONS = {"decide": "wait for a worker", "overhead": "slower steps", "rolewait": "wait for a role"}
"""Explanations of names of lost time that are too short (docs/goodput.md, Lost time)."""
RESPONSE_DESCRIPTIONS = {
    "InPlace": "processes restarted in place, pods kept",
    "Spare": "a warm spare took the rank",
    "Replace": "a new pod took the rank",
    "Shrink": "trained on with fewer workers",
    "Grow": "grew back to the requested size",
    "Resize": "changed to the requested size",
    "Suspend": "released all workers, as requested",
    "Stop": "stopped for good",
}
"""Description of each response of the recovery ladder."""


@dataclass(frozen=True, slots=True)
class InterruptionView:
    """One interruption and the response."""

    time: str
    at: float | None
    """Unix seconds of the failure, as precisely as it is known."""
    detected_at: float | None
    cause: str
    response: str
    pod: str
    node: str
    message: str
    generation: int
    attempt: int
    detected_seconds: float | None
    recovered_seconds: float | None
    """None while the recovery is in progress."""
    step_before: int | None
    resume_step: int | None
    steps_lost: int | None
    pods_replaced: int
    stages: dict[str, float]
    rank: int | None = None
    """First rank of the worker in that generation."""

    @property
    def stopped(self) -> bool:
        """Return whether it ended the job."""
        return self.response == "Stop"

    @property
    def open(self) -> bool:
        """Return whether the recovery is in progress."""
        return self.recovered_seconds is None and not self.stopped

    @property
    def answer(self) -> str:
        """Return the operator's response as text."""
        return RESPONSE_DESCRIPTIONS.get(self.response, self.response)


def read_interruptions(status: StatusReader[PublicStatus]) -> tuple[InterruptionView, ...]:
    """Return the history, oldest first."""
    return tuple(map(_entry, status.parts("history")))


def describe_loss(name: str) -> str:
    """Describe a cause or a stage of lost time by its name in the status, in either case."""
    explanation = _LOSS_EXPLANATIONS.get(name.lower())
    return f"{name} ({explanation})" if explanation else name


def format_ranks(first: int, count: int) -> str:
    """Format the ranks of a worker: `3`, or `96-127`."""
    return f"{first}-{first + count - 1}" if count > 1 else f"{first}"


def _rank(entry: StatusReader[Interruption]) -> int | None:
    rank = entry.integer("rank", -1)
    return None if rank < 0 else rank


def _entry(entry: StatusReader[Interruption]) -> InterruptionView:
    detected, failed = parse_rfc3339(entry.text("time")), entry.number("failedAt")
    before, stages = entry.integer("stepBefore", -1), entry.numbers("stages")
    return InterruptionView(
        time=entry.text("time"),
        at=failed if failed is not None else detected,
        detected_at=detected,
        cause=entry.text("cause"),
        response=entry.text("response"),
        pod=entry.text("pod"),
        node=entry.text("node"),
        message=entry.text("message"),
        generation=entry.integer("generation"),
        attempt=entry.integer("attempt"),
        detected_seconds=entry.number("detectedSeconds"),
        recovered_seconds=entry.number("recoveredSeconds"),
        step_before=None if before < 0 else before,
        resume_step=None if entry.number("resumeStep") is None else entry.integer("resumeStep"),
        steps_lost=None if entry.number("stepsLost") is None else entry.integer("stepsLost"),
        pods_replaced=entry.integer("podsReplaced"),
        stages={name: stages[name] for name in STAGES if name in stages},
        rank=_rank(entry),
    )
