"""Policy: delay a status write that only contains progress or counts; write any other change at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.context import PlanContext

COUNT_INTERVAL_SECONDS = 2.0
"""Shortest time between two status writes that only change the counts of workers."""


def find_next_write(context: PlanContext, old: TrainingJobStatus, status: TrainingJobStatus) -> float:
    """Return when the status may be written; one with only progress or counts waits after the last write."""
    if status == old:
        return 0.0
    if status.progress.step < old.progress.step:
        return 0.0  # training went back, or another client wrote the step
    if is_only_progress_change(old, status):
        written_at = max(parse_rfc3339(old.progress.updated) or 0.0, old.goodput.accounted_until or 0.0)
        return written_at + context.status_interval
    if is_only_counts_change(old, status):
        return context.observed.status_written + COUNT_INTERVAL_SECONDS
    return 0.0


def is_only_counts_change(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Return whether only counts of workers, the sentences about them, and progress have changed."""
    old_conditions = {condition.type: condition for condition in old.conditions}
    new_conditions = tuple(
        condition.replaced(message=old_conditions[condition.type].message)
        if condition.type in old_conditions
        else condition
        for condition in new.conditions
        if condition.type in old_conditions
        or not (condition.type is ConditionType.NODES_HEALTHY and condition.reason == Reason.NODES_HEALTHY.value)
    )
    membership = new.membership.replaced(reserve=old.membership.reserve)
    # Since when too few hold nodes: only the time-out reads it, which is late by the same time.
    began_holding = old.gang.holding_since is None and new.gang.holding_since is not None
    gang = new.gang.replaced(holding_since=None) if began_holding else new.gang
    return is_only_progress_change(
        old,
        new.replaced(
            ready_replicas=old.ready_replicas,
            spares=old.spares,
            membership=membership,
            conditions=new_conditions,
            gang=gang,
        ),
    )


def is_only_progress_change(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Return whether a status write could wait: only progress, checkpoints and goodput have changed."""
    has_same_length = len(old.history) == len(new.history)
    history = zip(old.history, new.history, strict=True) if has_same_length else ()
    history_with_old_stages = tuple(now.replaced(stages=before.stages) for before, now in history)
    unchanged_rest = new.replaced(
        progress=old.progress,
        stage_progress=old.stage_progress,
        goodput=old.goodput,
        checkpoint=old.checkpoint,
        committed_step=old.committed_step,
        history=history_with_old_stages if has_same_length else new.history,
    )
    return unchanged_rest == old
