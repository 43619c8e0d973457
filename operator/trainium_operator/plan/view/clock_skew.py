"""Policy: a time in the status that lies in the future counts as now.

It was written by an operator whose clock was ahead, or by hand. Without this a deadline would wait, a back-off hold and
a throttle stay shut until the clock has caught up, which may be hours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.status.start_failures import StartFailuresStatus
from trainium_operator.plan.model.times import parse_rfc3339, rfc3339

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.interruptions import Interruption
    from trainium_operator.plan.model.observed import Observed

_TOLERANCE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 900.0
"""No policy puts off longer than this what it tries again: a later time was not written by this clock."""


def in_the_present(observed: Observed) -> Observed:
    """The observation with a status that holds no time of the future."""
    job = observed.job
    status = _present(job.status, observed.now)
    return observed if status is job.status else replace(observed, job=replace(job, status=status))


def _present(status: TrainingJobStatus, now: float) -> TrainingJobStatus:
    """The status with such times replaced; the same object when there are none."""
    present = status
    if _late(status.waiting_since, now):
        present = present.replaced(waiting_since=now)
    if _late(status.leaving_since, now):
        present = present.replaced(leaving_since=now)
    if _late(status.activity.since, now):
        present = present.replaced(activity=status.activity.replaced(since=now))
    if any(_late(record.at, now) for record in status.failures):
        failures = (record.replaced(at=now) if _late(record.at, now) else record for record in status.failures)
        present = present.replaced(failures=tuple(failures))
    if any(_late(entry.failed_at, now) or _late(entry.decided_at, now) for entry in status.history):
        present = present.replaced(history=tuple(_present_entry(entry, now) for entry in status.history))
    if _late(status.goodput.accounted_until, now):
        present = present.replaced(goodput=status.goodput.replaced(accounted_until=now))
    if _late(parse_rfc3339(status.progress.updated), now):
        present = present.replaced(progress=status.progress.replaced(updated=rfc3339(now)))
    return _with_present_pauses(present, now)


def _with_present_pauses(status: TrainingJobStatus, now: float) -> TrainingJobStatus:
    """What waits in turns: since when, and until when it is not asked for again."""
    gang, idle = status.gang, status.idle_nodes
    if _late(gang.holding_since, now):
        gang = gang.replaced(holding_since=now)
    if _late(gang.retry_at, now + _LONGEST_PAUSE_SECONDS):
        gang = gang.replaced(retry_at=now)
    if _late(idle.asked_at, now):
        idle = idle.replaced(asked_at=now)
    if _late(idle.retry_at, now + _LONGEST_PAUSE_SECONDS):
        idle = idle.replaced(retry_at=now)
    same = gang is status.gang and idle is status.idle_nodes
    status = status if same else status.replaced(gang=gang, idle_nodes=idle)
    if _late(status.start_failures.at, now):
        # A pause that is counted from now in each plan would never end.
        status = status.replaced(start_failures=StartFailuresStatus(next_ordinal=status.start_failures.next_ordinal))
    return status


def _present_entry(entry: Interruption, now: float) -> Interruption:
    if _late(entry.failed_at, now):
        entry = entry.replaced(failed_at=now)
    return entry.replaced(decided_at=now) if _late(entry.decided_at, now) else entry


def _late(at: float | None, now: float) -> bool:
    return at is not None and at > now + _TOLERANCE_SECONDS
