"""Policy: report whether durable checkpoints are reliable: storage answers, and saves complete about as often as due.

A store that refuses makes the processes end (81). One that merely stalls stops nothing, because saves run in the
background, so it is detected by missing commits.

Guarantees:
- Nothing becomes overdue while the job makes no steps.
- Only a commit ends the alarm, not a recovery or a pause of the job.
- The sentence has the ranks' own error if they report one, and stays the same during the alarm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.status.conditions import ConditionStatus, ConditionType
from trainium_operator.plan.model.conditions import StatusT, find_condition, is_true, set_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.progress import is_past_steps

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.view.context import PlanContext

OVERDUE_INTERVALS = 3
"""Missing saves before the alarm: one may be skipped while another is still being written."""
MIN_OVERDUE_SECONDS = 10.0
_ALARMS = (Reason.CHECKPOINT_OVERDUE, Reason.STORAGE_UNAVAILABLE)
_STORAGE_PREFIX = "checkpoint storage"
"""Prefix of each of the trainer's sentences about its store."""


def set_checkpoint_health(context: PlanContext, status: StatusT) -> tuple[StatusT, tuple[float, ...]]:
    """Set the condition and return when to check again (Unix seconds); call when progress and history are complete."""
    storage_failures = [entry for entry in status.history if entry.cause is Cause.STORAGE]
    kind, now = ConditionType.CHECKPOINT_HEALTHY, context.now
    if storage_failures and storage_failures[-1].recovered_seconds is None:
        message = f"checkpoint storage is unavailable: {storage_failures[-1].message}"
        return set_condition(status, kind, False, Reason.STORAGE_UNAVAILABLE, message, now=now), ()
    overdue, requeue_at = _describe_overdue(context, status)
    if overdue:
        return set_condition(status, kind, False, Reason.CHECKPOINT_OVERDUE, overdue, now=now), requeue_at
    if _is_alarm_active(context, status):
        return status, requeue_at
    if status.checkpoint.durable_step >= 0:
        message = "durable checkpoints are committed"
        return set_condition(status, kind, True, Reason.COMMITTED, message, now=now), requeue_at
    if find_condition(status, kind) is None or context.current is None:
        reason, message = Reason.NOTHING_COMMITTED, "no durable checkpoint is known yet"
        if not context.job.spec.workload.checkpoint_folder:
            reason, message = Reason.CHECKPOINTS_UNKNOWN, "the job has no spec.program.checkpoints"
        return set_condition(status, kind, None, reason, message, now=now), requeue_at
    return status, requeue_at


def _is_alarm_active(context: PlanContext, status: PublicStatus) -> bool:
    """Return whether there is an alarm, and no commit since it began."""
    alarm, durable = find_condition(status, ConditionType.CHECKPOINT_HEALTHY), context.job.spec.checkpoint.durable
    if alarm is None or alarm.reason not in _ALARMS or alarm.status is not ConditionStatus.FALSE:
        return False
    if durable.every_seconds is None and durable.every_steps is None:
        return False  # no further commit is expected
    if status.checkpoint.durable_step > context.job.status.checkpoint.durable_step:
        return False
    began_at, committed_at = parse_rfc3339(alarm.last_transition_time), parse_rfc3339(status.checkpoint.durable_time)
    return began_at is None or committed_at is None or committed_at <= began_at


def _find_reported_error(context: PlanContext, status: PublicStatus) -> str:
    """Return the ranks' report about the store since the newest commit; empty if they report nothing."""
    since = parse_rfc3339(status.checkpoint.durable_time) or 0.0
    for entry in reversed(status.history):
        if entry.cause is Cause.STORAGE and entry.message and (entry.failed_at or 0.0) > since:
            return entry.message
    return next((report.notice for report in context.reports if report.notice.startswith(_STORAGE_PREFIX)), "")


def _describe_overdue(context: PlanContext, status: PublicStatus) -> tuple[str, tuple[float, ...]]:
    """Return the sentence about overdue commits, empty for none, and when to requeue (Unix seconds)."""
    durable, requeue_at = context.job.spec.checkpoint.durable, list[float]()
    since = _find_reference_time(context, status)
    if since is None or not is_true(status, ConditionType.RUNNING) or is_past_steps(status):
        return "", ()
    if not context.job.spec.workload.saves_on_schedule:
        return "", ()
    step = max(status.checkpoint.durable_step, 0)
    newest = f"step {step}" if status.checkpoint.durable_step >= 0 else "none"
    explanation = _find_reported_error(context, status) or "storage does not respond, or is too slow for this interval"
    if durable.every_seconds is not None:
        overdue_at = since + max(MIN_OVERDUE_SECONDS, OVERDUE_INTERVALS * durable.every_seconds)
        if context.now >= overdue_at:
            return f"a checkpoint is due every {durable.every_seconds} s and the newest is {newest}: {explanation}", ()
        requeue_at.append(overdue_at)
    steps_since = status.progress.step - step
    if durable.every_steps is not None and steps_since >= OVERDUE_INTERVALS * durable.every_steps:
        if context.now >= since + MIN_OVERDUE_SECONDS:
            text = f"a checkpoint is due every {durable.every_steps} steps and the newest is {newest}: {explanation}"
            return text, tuple(requeue_at)
        requeue_at.append(since + MIN_OVERDUE_SECONDS)
    return "", tuple(requeue_at)


def _find_reference_time(context: PlanContext, status: PublicStatus) -> float | None:
    """Return when saves last completed, or training last began; None before the first step."""
    times = [parse_rfc3339(status.start_time), parse_rfc3339(status.checkpoint.durable_time)]
    running = find_condition(context.job.status, ConditionType.RUNNING)
    if running is not None:
        times.append(parse_rfc3339(running.last_transition_time))
    valid_times = [time for time in times if time is not None]
    return max(valid_times) if status.start_time and valid_times else None
