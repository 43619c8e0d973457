"""The history of interruptions: opened when one is detected, closed at the first new step, each exactly once.

Invariants: each generation has at most one entry that ends it (further losses join it) and one per restart in place. An
entry is counted when it is opened and never again, in the same status write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause
from trainium_contract.job import Interruption, Rung, TrainingJobStatus
from trainium_operator.plan.budgets import record_failure
from trainium_operator.plan.causes import budget_of
from trainium_operator.plan.sentences import sentence
from trainium_operator.plan.times import rfc3339

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts

HISTORY_LENGTH = 10


def open_interruption(
    facts: Facts,
    draft: Draft,
    *,
    cause: Cause,
    rung: Rung,
    failed_at: float,
    attempt: int,
    pod: str = "",
    node: str = "",
    suspect: str = "",
    message: str = "",
    detected_seconds: float | None = None,
    step_before: int | None = None,
) -> None:
    """Add an entry and count it; `suspect` is the node to keep away from."""
    assert facts.current is not None
    entry = Interruption(
        generation=facts.current.generation,
        attempt=attempt,
        time=rfc3339(facts.now),
        cause=cause,
        rung=rung,
        node=node,
        pod=pod,
        message=sentence(message),
        detected_seconds=round(max(0.0, facts.now - failed_at) if detected_seconds is None else detected_seconds, 3),
        step_before=last_step(facts) if step_before is None else step_before,
        failed_at=failed_at,
    )
    status = draft.status
    draft.update(history=(*status.history, entry)[-HISTORY_LENGTH:])
    if rung not in (Rung.RESIZE, Rung.GROW):
        total, by_cause = status.restarts.total + 1, dict(status.restarts.by_cause)
        by_cause[cause.value] = by_cause.get(cause.value, 0) + 1
        draft.update(restarts=status.restarts.model_copy(update={"total": total, "by_cause": by_cause}))
    if budget_of(cause) is not None or cause is Cause.STORAGE:
        recovery = facts.job.spec.recovery
        draft.update(
            failures=record_failure(
                status.failures, at=facts.now, cause=cause, pod=pod, node=suspect, recovery=recovery
            )
        )


def open_membership_entry(status: TrainingJobStatus, generation: int) -> int | None:
    """Index of the open interruption that ends, or is to end, this generation; None when there is none."""
    for index, entry in enumerate(status.history):
        ends_it = entry.generation == generation and entry.rung not in (Rung.IN_PLACE, Rung.STOP)
        if ends_it and entry.recovered_seconds is None:
            return index
    return None


def replace_entry(draft: Draft, index: int, entry: Interruption) -> None:
    """Put a changed entry in the place of the one at `index`."""
    history = draft.status.history
    draft.update(history=(*history[:index], entry, *history[index + 1 :]))


def last_step(facts: Facts) -> int:
    """The last step that any member reported in the generation in force, else the status's; -1 when there is none."""
    reported = [beat.progress.step for _, beat in facts.beats if beat.progress is not None]
    return max([*reported, facts.job.status.progress.step]) or -1
