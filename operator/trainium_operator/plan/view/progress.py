"""Read the progress of the run, and the cost of a change of the membership, from heartbeats and the status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.interruptions import Rung
from trainium_contract.status.results import RunStage
from trainium_contract.wire.messages import HeartbeatRequest, Member, Progress, WorkerPhase

Heartbeats = tuple[tuple[Member, HeartbeatRequest], ...]

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.view.facts import Facts


def find_newest_progress(facts: Facts) -> Progress | None:
    """Return the lowest rank's newest report, once its processes train; for a program that of the rank with steps."""
    for _, heartbeat in sort_by_steps(facts, facts.heartbeats):
        if heartbeat.progress is not None:
            has_trained = heartbeat.phase in (WorkerPhase.TRAINING, WorkerPhase.FINISHED, WorkerPhase.YIELDED)
            return heartbeat.progress if has_trained else None
    return None


def sort_by_steps(facts: Facts, heartbeats: Heartbeats) -> Heartbeats:
    """Return the heartbeats by rank; for a program those with the most steps first.

    Any of its ranks may report them.
    """
    if facts.job.spec.workload.reports_each_step:
        return heartbeats
    return tuple(sorted(heartbeats, key=lambda each: -(each[1].progress.step if each[1].progress else -1)))


def count_total_steps(facts: Facts, newest: Progress) -> int:
    """Return the steps of the whole run: those of the spec, or those that the ranks report.

    The latter follow from the data if epochs decide (0: not yet), and from the size if steps differ in samples.
    """
    workload, recorded_steps = facts.job.spec.workload, facts.job.status.progress.total_steps
    return workload.fixed_steps or newest.total_steps or recorded_steps or workload.estimated_steps


def has_progress(facts: Facts) -> bool:
    """Return whether the job has ever made a step, or a program without steps has run for a while."""
    return has_reported_steps(facts) or bool(facts.job.status.start_time)


def has_reported_steps(facts: Facts) -> bool:
    """Return whether the job has ever reported a step."""
    reported = any(heartbeat.progress is not None and heartbeat.progress.step > 0 for _, heartbeat in facts.heartbeats)
    return reported or facts.job.status.progress.step > 0


STEADY_SECONDS = 60.0
"""A program without steps counts as started when all of its processes have run this long."""


def find_steady_time(facts: Facts) -> float | None:
    """Return when a program that has reported no step counts as started (Unix seconds); None while it does not run."""
    if facts.job.spec.workload.reports_each_step or has_reported_steps(facts) or not is_settled(facts):
        return None
    started_at = [
        min(heartbeat.progress.started, facts.now)
        for _, heartbeat in facts.heartbeats
        if heartbeat.progress is not None
    ]
    return max(started_at, default=facts.now) + STEADY_SECONDS


def has_stepped(facts: Facts) -> bool:
    """Return whether the current generation has made a step, or is past the last one."""
    steady = find_steady_time(facts)
    if steady is not None:
        return facts.now >= steady
    for _, heartbeat in facts.heartbeats:
        progress = heartbeat.progress
        if progress is None or heartbeat.phase not in (WorkerPhase.TRAINING, WorkerPhase.FINISHED):
            continue
        if not progress.training or progress.step > (progress.resume_step or 0):
            return True
    return False


def find_last_step(facts: Facts) -> int:
    """Return the last step that any member reported in the current generation, else the status's; -1 without one."""
    reported = [heartbeat.progress.step for _, heartbeat in facts.heartbeats if heartbeat.progress is not None]
    return max([*reported, facts.job.status.progress.step]) or -1


def is_settled(facts: Facts) -> bool:
    """Return whether every member trains in the current generation."""
    if facts.current is None:
        return False
    training = sum(heartbeat.phase is WorkerPhase.TRAINING for _, heartbeat in facts.heartbeats)
    return training == len(facts.current.members)


def is_past_steps(status: PublicStatus) -> bool:
    """Return whether the run is in a stage after its steps."""
    return status.stage not in ("", RunStage.TRAIN)


_WITHOUT_MEMBERSHIP_CHANGE = (Rung.IN_PLACE, Rung.STOP)


def measure_resize_seconds(status: PublicStatus) -> float | None:
    """Return the seconds from the newest decision on a membership to its first new step; None without a measurement."""
    for entry in reversed(status.history):
        if (
            entry.rung not in _WITHOUT_MEMBERSHIP_CHANGE
            and entry.recovered_seconds is not None
            and entry.decided_at is not None
        ):
            waited = max(0.0, entry.decided_at - (entry.failed_at or entry.decided_at))
            return max(0.0, entry.recovered_seconds - waited)
    return None
