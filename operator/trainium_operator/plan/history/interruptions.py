"""Open an interruption when members fail, and count it.

Guarantees:
- Each generation has at most one entry that ends it, which further failures join, and one per restart in place.
- An entry is counted in the status write that opens it and never again, however many members failed.
- The counts by cause are authoritative; their sum is the total, also after a person edited either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.interruptions import MAX_COUNTED_CAUSES, Interruption, Rung
from trainium_operator.plan.faults.failure_budgets import is_recorded, record_failure
from trainium_operator.plan.model.text import format_names, format_sentence, rfc3339
from trainium_operator.plan.view.progress import last_step

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import FailureRecord, InternalStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.diagnose.loss import Loss
    from trainium_operator.plan.view.facts import Facts


HISTORY_LENGTH = 10
_CAUSES = frozenset(cause.value for cause in Cause)


def open_interruption(
    facts: Facts,
    status: TrainingJobStatus,
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
) -> TrainingJobStatus:
    """Add an entry to the history and count it; `suspect` is the node to avoid."""
    assert facts.current is not None
    entry = Interruption(
        generation=facts.current.generation,
        attempt=attempt,
        time=rfc3339(facts.now),
        cause=cause,
        rung=rung,
        node=node,
        pod=pod,
        message=format_sentence(message),
        detected_seconds=round(max(0.0, facts.now - failed_at) if detected_seconds is None else detected_seconds, 3),
        step_before=last_step(facts) if step_before is None else step_before,
        failed_at=failed_at,
        rank=first_rank(facts, pod),
    )
    failures = status.failures
    status = status.replaced(history=(*status.history, entry)[-HISTORY_LENGTH:])
    if rung not in (Rung.RESIZE, Rung.GROW):
        status = _count_interruption(status, cause)
    recovery = facts.job.spec.recovery
    if not is_recorded(cause, recovery):
        return status
    failures = record_failure(failures, at=facts.now, cause=cause, pod=pod, node=suspect, recovery=recovery)
    return status.replaced(failures=failures)


def with_valid_counts(status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status without negative counts and with their sum as the total, also after an edit."""
    by_cause = {name: max(0, count) for name, count in status.restarts.by_cause.items()}
    valid = status.restarts.replaced(total=sum(by_cause.values()), by_cause=by_cause)
    return status if valid == status.restarts else status.replaced(restarts=valid)


def _count_interruption(status: TrainingJobStatus, cause: Cause) -> TrainingJobStatus:
    by_cause = dict(status.restarts.by_cause)
    if cause.value not in by_cause and len(by_cause) >= MAX_COUNTED_CAUSES:
        # The API server would refuse every later status with one key more than the definition allows.
        by_cause = {name: count for name, count in by_cause.items() if name in _CAUSES}
    by_cause[cause.value] = by_cause.get(cause.value, 0) + 1
    return with_valid_counts(status.replaced(restarts=status.restarts.replaced(by_cause=by_cause)))


def first_rank(facts: Facts, pod: str) -> int | None:
    """Return the first rank of this pod in the current generation; None if it has none there."""
    if facts.current is None or not pod:
        return None
    places = (member.node_rank for member in facts.current.members if member.pod_name == pod)
    place = next(places, None)
    return None if place is None else place * facts.current.processes_per_node


def identity(entry: Interruption) -> tuple[int, int, str, str, bool]:
    """Return what identifies an entry while its other fields change."""
    return (entry.generation, entry.attempt, entry.time, entry.pod, entry.rung is Rung.IN_PLACE)


def open_membership_entry(status: PublicStatus, generation: int) -> int | None:
    """Return the index of the open interruption that ends this generation, or is about to; None without one."""
    for index, entry in enumerate(status.history):
        ends_it = entry.generation == generation and entry.rung not in (Rung.IN_PLACE, Rung.STOP)
        if ends_it and entry.recovered_seconds is None:
            return index
    return None


def replace_entry(status: TrainingJobStatus, index: int, entry: Interruption) -> TrainingJobStatus:
    """Replace the entry at `index`."""
    history = status.history
    return status.replaced(history=(*history[:index], entry, *history[index + 1 :]))


MOST_SUSPECTS = 16
"""Most workers lost at once whose nodes are recorded; enough for a rack, and the record stays small."""


def record_losses(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> TrainingJobStatus:
    """Open the interruption of the current generation, unless it is open or the next generation is decided."""
    if not losses or facts.current is None:
        return status
    generation = facts.current.generation
    if open_membership_entry(status, generation) is not None:
        return status.replaced(failures=_with_suspects(facts, status, losses))
    if status.membership.generation != generation:
        return status
    first = losses[0]
    others = "" if len(losses) == 1 else f"; {len(losses)} workers: {format_names(_names(losses))}"
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
    """Return the failures with the suspected nodes of all workers that failed together, without duplicates."""
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
