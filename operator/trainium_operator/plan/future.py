"""Policy: a time in the status that lies in the future counts as now.

It was written by an operator whose clock was ahead, or by hand. Without this a deadline would wait, a back-off hold and
a throttle stay shut until the clock has caught up, which may be hours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainium_operator.plan.times import parse_rfc3339, rfc3339

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model import Observed

_TOLERANCE_SECONDS = 2.0


def in_the_present(observed: Observed) -> Observed:
    """The observation with a status that holds no time of the future."""
    job = observed.job
    status = _present(job.status, observed.now)
    return observed if status is job.status else replace(observed, job=replace(job, status=status))


def _present(status: TrainingJobStatus, now: float) -> TrainingJobStatus:
    """The status with such times replaced; the same object when there are none."""
    changes: dict[str, Any] = {}

    def late(at: float | None) -> bool:
        return at is not None and at > now + _TOLERANCE_SECONDS

    for name in ("waiting_since", "leaving_since"):
        if late(getattr(status, name)):
            changes[name] = now
    if any(late(record.at) for record in status.failures):
        changes["failures"] = tuple(
            record.model_copy(update={"at": now}) if late(record.at) else record for record in status.failures
        )
    for name in ("failed_at", "decided_at"):
        if any(late(getattr(entry, name)) for entry in status.history):
            history = changes.get("history", status.history)
            changes["history"] = tuple(
                entry.model_copy(update={name: now}) if late(getattr(entry, name)) else entry for entry in history
            )
    if late(status.goodput.accounted_until):
        changes["goodput"] = status.goodput.model_copy(update={"accounted_until": now})
    if late(parse_rfc3339(status.progress.updated)):
        changes["progress"] = status.progress.model_copy(update={"updated": rfc3339(now)})
    return status.model_copy(update=changes) if changes else status
