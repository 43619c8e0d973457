"""The interruptions of a job, as the operator's history tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.views.raw import mapping, number, numbers, objects, seconds_of, text, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

STAGES = ("detect", "decide", "restart", "load", "replay")
"""Stages of a recovery, in their order."""
_MEANT = {"decide": "wait for a worker"}
"""What a stage is, where its name in the status says too little (docs/decisions/0116-decide-is-the-wait.md)."""
ANSWERS = {
    "InPlace": "processes restarted in place, pods kept",
    "Spare": "a warm spare took the rank",
    "Replace": "a new pod took the rank",
    "Shrink": "trained on with fewer workers",
    "Grow": "grew back to the size asked for",
    "Resize": "changed to the size asked for",
    "Stop": "stopped for good",
}
"""What each rung of the ladder did."""


@dataclass(frozen=True, slots=True)
class InterruptionView:
    """One interruption and its answer."""

    time: str
    at: float | None
    """Unix seconds of the failure, as well as it is known."""
    detected_at: float | None
    cause: str
    rung: str
    pod: str
    node: str
    message: str
    generation: int
    attempt: int
    detected_seconds: float | None
    recovered_seconds: float | None
    """None while the recovery is under way."""
    step_before: int | None
    resume_step: int | None
    steps_lost: int | None
    pods_replaced: int
    stages: dict[str, float]
    rank: int | None = None
    """First rank of the worker in that generation."""

    @property
    def stopped(self) -> bool:
        """It ended the job."""
        return self.rung == "Stop"

    @property
    def open(self) -> bool:
        """The recovery is under way."""
        return self.recovered_seconds is None and not self.stopped

    @property
    def answer(self) -> str:
        """What the operator did, in words."""
        return ANSWERS.get(self.rung, self.rung)


def interruptions(status: Mapping[str, Any]) -> tuple[InterruptionView, ...]:
    """The history, oldest first."""
    return tuple(_entry(raw) for raw in objects(status, "history"))


def stage_words(name: str) -> str:
    """A stage of the ledger for people, by its name in the status; in either case of letters."""
    meant = _MEANT.get(name.lower())
    return f"{name} ({meant})" if meant else name


def ranks_text(first: int, per: int) -> str:
    """The ranks of a worker: `3`, or `96-127`."""
    return f"{first}-{first + per - 1}" if per > 1 else f"{first}"


def _rank(raw: Mapping[str, Any]) -> int | None:
    rank = whole(raw, "rank", -1)
    return None if rank < 0 else rank


def _entry(raw: Mapping[str, Any]) -> InterruptionView:
    detected, failed = seconds_of(text(raw, "time")), number(raw, "failedAt")
    before, stages = whole(raw, "stepBefore", -1), numbers(raw, "stages")
    return InterruptionView(
        time=text(raw, "time"),
        at=failed if failed is not None else detected,
        detected_at=detected,
        cause=text(raw, "cause"),
        rung=text(raw, "rung"),
        pod=text(raw, "pod"),
        node=text(raw, "node"),
        message=text(raw, "message"),
        generation=whole(raw, "generation"),
        attempt=whole(raw, "attempt"),
        detected_seconds=number(raw, "detectedSeconds"),
        recovered_seconds=number(raw, "recoveredSeconds"),
        step_before=None if before < 0 else before,
        resume_step=None if number(raw, "resumeStep") is None else whole(raw, "resumeStep"),
        steps_lost=None if number(raw, "stepsLost") is None else whole(raw, "stepsLost"),
        pods_replaced=whole(raw, "podsReplaced"),
        stages={name: stages[name] for name in STAGES if name in stages} if mapping(raw, "stages") else {},
        rank=_rank(raw),
    )
