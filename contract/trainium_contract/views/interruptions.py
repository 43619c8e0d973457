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
    return tuple(map(_read_entry, status.read_parts("history")))


def describe_loss(name: str) -> str:
    """Describe a cause or a stage of lost time by its name in the status, in either case."""
    explanation = _LOSS_EXPLANATIONS.get(name.lower())
    return f"{name} ({explanation})" if explanation else name


def format_ranks(first: int, count: int) -> str:
    """Format the ranks of a worker: `3`, or `96-127`."""
    return f"{first}-{first + count - 1}" if count > 1 else f"{first}"


def _read_rank(entry: StatusReader[Interruption]) -> int | None:
    rank = entry.read_integer("rank", -1)
    return None if rank < 0 else rank


def _read_entry(entry: StatusReader[Interruption]) -> InterruptionView:
    detected, failed = parse_rfc3339(entry.read_text("time")), entry.read_number("failedAt")
    before, stages = entry.read_integer("stepBefore", -1), entry.read_numbers("stages")
    return InterruptionView(
        time=entry.read_text("time"),
        at=failed if failed is not None else detected,
        detected_at=detected,
        cause=entry.read_text("cause"),
        response=entry.read_text("response"),
        pod=entry.read_text("pod"),
        node=entry.read_text("node"),
        message=entry.read_text("message"),
        generation=entry.read_integer("generation"),
        attempt=entry.read_integer("attempt"),
        detected_seconds=entry.read_number("detectedSeconds"),
        recovered_seconds=entry.read_number("recoveredSeconds"),
        step_before=None if before < 0 else before,
        resume_step=None if entry.read_number("resumeStep") is None else entry.read_integer("resumeStep"),
        steps_lost=None if entry.read_number("stepsLost") is None else entry.read_integer("stepsLost"),
        pods_replaced=entry.read_integer("podsReplaced"),
        stages={name: stages[name] for name in STAGES if name in stages},
        rank=_read_rank(entry),
    )
