"""The history of interruptions: opened when one is detected, closed at the first new step, each exactly once.

Invariants: each generation has at most one entry that ends it (further losses join it) and one per restart in place. An
entry is counted when it is opened and never again, in the same status write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.job import Interruption, Rung, TrainingJobStatus
from trainium_operator.plan.budgets import is_recorded, record_failure
from trainium_operator.plan.sentences import sentence
from trainium_operator.plan.times import rfc3339

if TYPE_CHECKING:
    from trainium_contract.exit_codes import Cause
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.loss import Loss

HISTORY_LENGTH = 10
MOST_SUSPECTS = 16
"""Workers lost at once whose nodes are remembered: enough for a rack's power, and the record stays small."""


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
    recovery = facts.job.spec.recovery
    if is_recorded(cause, recovery):
        draft.update(
            failures=record_failure(
                status.failures, at=facts.now, cause=cause, pod=pod, node=suspect, recovery=recovery
            )
        )


def record_suspects(facts: Facts, draft: Draft, losses: tuple[Loss, ...]) -> None:
    """Remember the suspected nodes of all workers that were lost together, each once, as one moment for the budgets."""
    recovery, recorded = facts.job.spec.recovery, {record.pod for record in draft.status.failures if record.node}
    for loss in losses[:MOST_SUSPECTS]:
        pod = loss.member.pod_name
        if loss.suspect and pod not in recorded and is_recorded(loss.cause, recovery):
            moments = [record.at for record in draft.status.failures if record.node and record.pod in _names(losses)]
            failures = record_failure(
                draft.status.failures,
                at=min(moments, default=facts.now),
                cause=loss.cause,
                pod=pod,
                node=loss.suspect,
                recovery=recovery,
            )
            draft.update(failures=failures)


def _names(losses: tuple[Loss, ...]) -> frozenset[str]:
    return frozenset(loss.member.pod_name for loss in losses)


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
