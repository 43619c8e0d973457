"""Policy: whether durable checkpoints can be relied on: storage answers, and saves end about as often as they are due.

A store that refuses makes the processes end (81); one that merely stands still stops nothing, because saves run in the
background, so it is noticed by the commits that do not come. Invariants: nothing is overdue while the job does not
make steps; a commit ends the alarm; the sentence stays the same while the alarm lasts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.model.conditions import find_condition, is_true, with_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.times import parse_rfc3339
from trainium_operator.plan.view.progress import past_steps

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.conditions import AnyShown
    from trainium_operator.plan.view.facts import Facts

OVERDUE_INTERVALS = 3
"""Saves that may fail to come before it is said: one may be skipped while another is still being written."""
SHORTEST_OVERDUE_SECONDS = 10.0


def judge_checkpoints(facts: Facts, status: AnyShown) -> tuple[AnyShown, tuple[float, ...]]:
    """Set the condition; call when progress and the history are complete. Also when to look again (Unix seconds)."""
    troubled = [entry for entry in status.history if entry.cause is Cause.STORAGE]
    kind, now = ConditionType.CHECKPOINT_HEALTHY, facts.now
    if troubled and troubled[-1].recovered_seconds is None:
        message = f"checkpoint storage is unavailable: {troubled[-1].message}"
        return with_condition(status, kind, False, Reason.STORAGE_UNAVAILABLE, message, now=now), ()
    overdue, looks = _overdue(facts, status)
    if overdue:
        return with_condition(status, kind, False, Reason.CHECKPOINT_OVERDUE, overdue, now=now), looks
    if status.checkpoint.durable_step >= 0:
        message = "durable checkpoints are committed"
        return with_condition(status, kind, True, Reason.COMMITTED, message, now=now), looks
    if find_condition(status, kind) is None or facts.current is None:
        message = "no durable checkpoint is known yet"
        return with_condition(status, kind, None, Reason.NOTHING_COMMITTED, message, now=now), looks
    return status, looks


def _overdue(facts: Facts, status: PublicStatus) -> tuple[str, tuple[float, ...]]:
    """What to say about commits that do not come, empty when they do; and when to look again (Unix seconds)."""
    durable, looks = facts.job.spec.checkpoint.durable, list[float]()
    since = _since(facts, status)
    if since is None or not is_true(status, ConditionType.RUNNING) or past_steps(status):
        return "", ()
    step = max(status.checkpoint.durable_step, 0)
    newest = f"step {step}" if status.checkpoint.durable_step >= 0 else "none"
    tail = "storage stands still, or is too slow for this interval"
    if durable.every_seconds is not None:
        due = since + max(SHORTEST_OVERDUE_SECONDS, OVERDUE_INTERVALS * durable.every_seconds)
        if facts.now >= due:
            return f"a checkpoint is due every {durable.every_seconds} s and the newest is {newest}: {tail}", ()
        looks.append(due)
    behind = status.progress.step - step
    if durable.every_steps is not None and behind >= OVERDUE_INTERVALS * durable.every_steps:
        if facts.now >= since + SHORTEST_OVERDUE_SECONDS:
            told = f"a checkpoint is due every {durable.every_steps} steps and the newest is {newest}: {tail}"
            return told, tuple(looks)
        looks.append(since + SHORTEST_OVERDUE_SECONDS)
    return "", tuple(looks)


def _since(facts: Facts, status: PublicStatus) -> float | None:
    """When saves last ended, or training last began; None before the first step."""
    times = [parse_rfc3339(status.start_time), parse_rfc3339(status.checkpoint.durable_time)]
    running = find_condition(facts.job.status, ConditionType.RUNNING)
    if running is not None:
        times.append(parse_rfc3339(running.last_transition_time))
    known = [time for time in times if time is not None]
    return max(known) if status.start_time and known else None
