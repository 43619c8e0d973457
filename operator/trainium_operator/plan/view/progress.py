"""Read the length of the run, and the cost of a change of the membership, from heartbeats and the status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.results import RunStage

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.status.public import PublicStatus
    from trainium_contract.wire.messages import HeartbeatRequest, Member, Progress
    from trainium_operator.plan.model.observed import JobView

    Heartbeats = tuple[tuple[Member, HeartbeatRequest], ...]


def sort_by_steps(spec: TrainingJobSpec, heartbeats: Heartbeats) -> Heartbeats:
    """Return the heartbeats by rank; for a program those with the most steps first.

    Any of its ranks may report them.
    """
    if spec.workload.reports_each_step:
        return heartbeats
    return tuple(
        sorted(heartbeats, key=lambda heartbeat: -(heartbeat[1].progress.step if heartbeat[1].progress else -1))
    )


def count_total_steps(job: JobView, newest: Progress) -> int:
    """Return the steps of the whole run: those of the spec, or those that the ranks report.

    The latter follow from the data if epochs decide (0: not yet), and from the size if steps differ in samples.
    """
    workload = job.spec.workload
    return workload.fixed_steps or newest.total_steps or job.status.progress.total_steps or workload.estimated_steps


def is_past_steps(status: PublicStatus) -> bool:
    """Return whether the run is in a stage after its steps."""
    return status.stage not in ("", RunStage.TRAIN)


_WITHOUT_MEMBERSHIP_CHANGE = (RecoveryResponse.IN_PLACE, RecoveryResponse.STOP)


def measure_resize_seconds(status: PublicStatus) -> float | None:
    """Return the seconds from the newest decision on a membership to its first new step; None without a measurement."""
    for entry in reversed(status.history):
        if (
            entry.response not in _WITHOUT_MEMBERSHIP_CHANGE
            and entry.recovered_seconds is not None
            and entry.decided_at is not None
        ):
            waited = max(0.0, entry.decided_at - (entry.failed_at or entry.decided_at))
            return max(0.0, entry.recovered_seconds - waited)
    return None
