"""Policy: lost members open one interruption of their generation, and the nodes they are attributed to are remembered.

Invariant: a loss is noted and counted once per generation, however many members are lost and however often it is seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.interruptions import Rung
from trainium_operator.plan.faults.failure_budgets import is_recorded, record_failure
from trainium_operator.plan.history.interruptions import open_interruption, open_membership_entry
from trainium_operator.plan.model.sentences import listed

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import FailureRecord, InternalStatus
    from trainium_operator.plan.diagnose.loss import Loss
    from trainium_operator.plan.view.facts import Facts

MOST_SUSPECTS = 16
"""Workers lost at once whose nodes are remembered: enough for a rack's power, and the record stays small."""


def note_losses(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> TrainingJobStatus:
    """Open the interruption of the generation in force, unless it is open already or its successor is decided."""
    if not losses or facts.current is None:
        return status
    generation = facts.current.generation
    if open_membership_entry(status, generation) is not None:
        return status.replaced(failures=_with_suspects(facts, status, losses))
    if status.membership.generation != generation:
        return status
    first = losses[0]
    others = "" if len(losses) == 1 else f"; {len(losses)} workers: {listed(_names(losses))}"
    status = open_interruption(
        facts,
        status,
        cause=first.cause,
        rung=Rung.REPLACE,
        failed_at=first.failed_at,
        attempt=status.membership.attempt,
        pod=first.member.pod_name,
        node=first.member.node_name,
        suspect=first.suspect,
        message=first.message + others,
    )
    return status.replaced(failures=_with_suspects(facts, status, losses), waiting_since=facts.now)


def _with_suspects(facts: Facts, memory: InternalStatus, losses: tuple[Loss, ...]) -> tuple[FailureRecord, ...]:
    """The failures, with the suspected nodes of all workers that were lost together: each once, as one moment."""
    names = frozenset(_names(losses))
    recovery, recorded = facts.job.spec.recovery, {record.pod for record in memory.failures if record.node}
    failures = memory.failures
    for loss in losses[:MOST_SUSPECTS]:
        pod = loss.member.pod_name
        if loss.suspect and pod not in recorded and is_recorded(loss.cause, recovery):
            moments = [record.at for record in failures if record.node and record.pod in names]
            at = min(moments, default=facts.now)
            failures = record_failure(failures, at=at, cause=loss.cause, pod=pod, node=loss.suspect, recovery=recovery)
    return failures


def _names(losses: tuple[Loss, ...]) -> tuple[str, ...]:
    return tuple(loss.member.pod_name for loss in losses)
