"""Inject a fault into a job, follow the recovery in its history, and measure it by the records of its steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_devcluster.jobs.driver import JobDriver

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """State of a job right before a fault."""

    interruptions: frozenset[tuple[Any, ...]]
    """Keys of the entries of its history."""
    pod_uids: frozenset[str]
    taken_at: float = field(default_factory=time.time)
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault in a job."""

    before: JobSnapshot
    injected_at: float
    """Unix seconds."""
    completed_step: int
    """Newest step that was complete right after the fault."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery; seconds count from the fault."""

    entries: tuple[Json, ...]
    """Interruptions that the fault caused, oldest first."""
    last_step: int
    """Newest step that was completed before the job resumed."""
    detection_seconds: float | None
    """None if the history has no time of the failure."""
    recovery_seconds: float | None
    """Seconds to the end of the first step that was not completed before."""
    steps_lost: int

    @property
    def pods_joined(self) -> int:
        """Number of pods that joined."""
        return sum(int(entry.get("podsReplaced", 0)) for entry in self.entries)


def identify_interruption(entry: Json) -> tuple[Any, ...]:
    """Return the identity of an interruption, without its response, which may still change."""
    return (entry["generation"], entry.get("attempt", 0), entry.get("failedAt"))


def take_snapshot(job: JobDriver) -> JobSnapshot:
    """Record the state of the job."""
    return JobSnapshot(frozenset(map(identify_interruption, job.read_history())), frozenset(job.list_uids()))


def inject(job: JobDriver, action: Callable[[], object]) -> InjectedFault:
    """Inject a fault by an action, which may return the time of the fault."""
    before, started_at = take_snapshot(job), time.time()
    injected_at = action()
    return InjectedFault(before, injected_at if isinstance(injected_at, float) else started_at, job.read_newest_step())


def follow(job: JobDriver, fault: InjectedFault, seconds: float, pause: float = 0.0) -> Recovery:
    """Wait for the recovery from a fault, each time for at most `seconds`, and measure it.

    After the first recovery, wait `pause` seconds for further interruptions by the same fault.
    """

    def list_recovered_entries() -> list[Json]:
        entries = [
            entry for entry in job.read_history() if identify_interruption(entry) not in fault.before.interruptions
        ]
        return entries if all(entry.get("recoveredSeconds") is not None for entry in entries) else []

    job.wait_for("the recovery", list_recovered_entries, seconds)
    if pause:
        time.sleep(pause)
    entries = job.wait_for("the recovery from all interruptions", list_recovered_entries, seconds)
    first, last, completed = entries[0], entries[-1], fault.completed_step
    resumed = min(entry.get("resumeStep", completed) for entry in entries)
    # The trainer saves the steps after the decision to resize; a program repeats them.
    last_step = max(completed, *(entry.get("stepBefore", 0) for entry in entries), last.get("resumeStep") or 0)
    job.wait_for_step(last_step + 1, seconds)
    job.log.refresh()
    ended_at = job.log.step_time(last_step + 1)
    failed_at = first.get("failedAt")
    detected = failed_at + first["detectedSeconds"] - fault.injected_at if failed_at else None
    return Recovery(
        entries=tuple(entries),
        last_step=last_step,
        detection_seconds=None if detected is None else round(max(0.0, detected), 3),
        recovery_seconds=None if ended_at is None else round(ended_at - fault.injected_at, 3),
        steps_lost=max(0, completed - resumed, *(entry.get("stepsLost") or 0 for entry in entries)),
    )
