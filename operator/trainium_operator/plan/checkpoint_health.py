"""Policy: whether durable checkpoints can be relied on: storage answers, and saves end about as often as they are due.

A store that refuses makes the processes end (81); one that merely stands still stops nothing, because saves run in the
background, so it is noticed by the commits that do not come. Invariants: nothing is overdue while the job does not
train; a commit ends the alarm; the sentence stays the same while the alarm lasts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause
from trainium_contract.job import ConditionType
from trainium_operator.plan.conditions import find_condition, is_true
from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.times import parse_rfc3339

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts

OVERDUE_INTERVALS = 3
"""Saves that may fail to come before it is said: one may be skipped while another is still being written."""
SHORTEST_OVERDUE_SECONDS = 10.0


def judge_checkpoints(facts: Facts, draft: Draft) -> None:
    """Set the condition; call when progress and the history are complete."""
    troubled = [entry for entry in draft.status.history if entry.cause is Cause.STORAGE]
    kind = ConditionType.CHECKPOINT_HEALTHY
    if troubled and troubled[-1].recovered_seconds is None:
        message = f"checkpoint storage is unavailable: {troubled[-1].message}"
        draft.condition(kind, False, Reason.STORAGE_UNAVAILABLE, message)
    elif overdue := _overdue(facts, draft):
        draft.condition(kind, False, Reason.CHECKPOINT_OVERDUE, overdue)
    elif draft.status.checkpoint.durable_step >= 0:
        draft.condition(kind, True, Reason.COMMITTED, "durable checkpoints are committed")
    elif find_condition(draft.status, kind) is None or facts.current is None:
        draft.condition(kind, None, Reason.NOTHING_COMMITTED, "no durable checkpoint is known yet")


def _overdue(facts: Facts, draft: Draft) -> str:
    """What to say about commits that do not come; empty when they do. Sets the time of the next look."""
    status, durable = draft.status, facts.job.spec.checkpoint.durable
    since = _since(facts, draft)
    if since is None or not is_true(status, ConditionType.RUNNING):
        return ""
    step = max(status.checkpoint.durable_step, 0)
    newest = f"step {step}" if status.checkpoint.durable_step >= 0 else "none"
    tail = "storage stands still, or is too slow for this interval"
    if durable.every_seconds is not None:
        due = since + max(SHORTEST_OVERDUE_SECONDS, OVERDUE_INTERVALS * durable.every_seconds)
        if facts.now >= due:
            return f"a checkpoint is due every {durable.every_seconds} s and the newest is {newest}: {tail}"
        draft.deadlines.append(due)
    behind = status.progress.step - step
    if durable.every_steps is not None and behind >= OVERDUE_INTERVALS * durable.every_steps:
        if facts.now >= since + SHORTEST_OVERDUE_SECONDS:
            return f"a checkpoint is due every {durable.every_steps} steps and the newest is {newest}: {tail}"
        draft.deadlines.append(since + SHORTEST_OVERDUE_SECONDS)
    return ""


def _since(facts: Facts, draft: Draft) -> float | None:
    """When saves last ended, or training last began; None before the first step."""
    status = draft.status
    times = [parse_rfc3339(status.start_time), parse_rfc3339(status.checkpoint.durable_time)]
    running = find_condition(facts.job.status, ConditionType.RUNNING)
    if running is not None:
        times.append(parse_rfc3339(running.last_transition_time))
    known = [time for time in times if time is not None]
    return max(known) if status.start_time and known else None
