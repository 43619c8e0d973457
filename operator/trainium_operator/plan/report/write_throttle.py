"""Policy: a status that only brings progress or counts is written less often; anything else is written at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.model.times import parse_rfc3339

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.facts import Facts


def write_due(facts: Facts, old: TrainingJobStatus, status: TrainingJobStatus) -> float:
    """When the status may be written: one that only brings progress or counts waits a while after the last one."""
    if status == old:
        return 0.0
    if only_progress_differs(old, status):
        written = max(parse_rfc3339(old.progress.updated) or 0.0, old.goodput.accounted_until or 0.0)
        return written + facts.status_interval
    if only_counts_differ(old, status):
        return facts.observed.status_written + facts.settings.count_interval_seconds
    return 0.0


def only_counts_differ(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether nothing but counts of workers, with the sentences that tell them, and progress has changed."""
    before = {condition.type: condition for condition in old.conditions}
    told = tuple(
        condition.replaced(message=before[condition.type].message) if condition.type in before else condition
        for condition in new.conditions
    )
    membership = new.membership.replaced(reserve=old.membership.reserve)
    return only_progress_differs(
        old,
        new.replaced(ready_replicas=old.ready_replicas, spares=old.spares, membership=membership, conditions=told),
    )


def only_progress_differs(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether a status write could wait: nothing but progress, checkpoints and goodput has changed."""
    same = len(old.history) == len(new.history)
    history = zip(old.history, new.history, strict=True) if same else ()
    charged = tuple(now.replaced(stages=before.stages) for before, now in history)
    still = new.replaced(
        progress=old.progress,
        stage_progress=old.stage_progress,
        goodput=old.goodput,
        checkpoint=old.checkpoint,
        history=charged if same else new.history,
    )
    return still == old
