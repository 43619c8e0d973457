"""Open an interruption when members fail, and count it.

Guarantees:
- Each generation has at most one entry that ends it, which further failures join, and one per restart in place.
- An entry is counted in the status write that opens it and never again, however many members failed.
- The counts by cause are authoritative; their sum is the total, also after a person edited either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.internal import FailureRecord
from trainium_contract.status.interruptions import MAX_COUNTED_CAUSES, PLANNED_RESPONSES, Interruption, RecoveryResponse
from trainium_operator.plan.faults.failure_budgets import is_recorded, record_failure
from trainium_operator.plan.model.text import format_names, format_sentence

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import InternalStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_contract.wire.messages import Member, RestartRecord
    from trainium_operator.plan.diagnose.failed_member import FailedMember
    from trainium_operator.plan.view.context import PlanContext


HISTORY_LENGTH = 10
_CAUSES = frozenset(cause.value for cause in Cause)


def open_interruption(
    context: PlanContext,
    status: TrainingJobStatus,
    *,
    cause: Cause,
    response: RecoveryResponse,
    message: str,
    failed_at: float | None = None,
    attempt: int | None = None,
    member: Member | None = None,
    suspected_node: str = "",
    restart: RestartRecord | None = None,
) -> TrainingJobStatus:
    """Add an entry to the history and count it; by default for a failure now, in the present attempt.

    failed_at: Unix seconds. member: the one that caused it; None if nobody is blamed. suspected_node: the node to
    avoid. restart: an agent's record of it, which has the time of its detection and the step before.
    """
    assert context.current is not None
    failed_at, pod = context.now if failed_at is None else failed_at, member.pod_name if member is not None else ""
    detected_at = context.now if restart is None else restart.detected_at
    entry = Interruption(
        generation=context.current.generation,
        attempt=status.membership.attempt if attempt is None else attempt,
        time=format_rfc3339(context.now),
        cause=cause,
        response=response,
        node=member.node_name if member is not None else "",
        pod=pod,
        message=format_sentence(message),
        detected_seconds=round(max(0.0, detected_at - failed_at), 3),
        step_before=context.last_step if restart is None or restart.step_before < 0 else restart.step_before,
        failed_at=failed_at,
        rank=find_first_rank(context, pod),
    )
    status = status.replaced(history=(*status.history, entry)[-HISTORY_LENGTH:])
    if response not in PLANNED_RESPONSES:
        status = _count_interruption(status, cause)
    recovery = context.job.spec.recovery
    if not is_recorded(cause, recovery):
        return status
    failure = FailureRecord(at=context.now, cause=cause, pod=pod, node=suspected_node)
    return status.replaced(failures=record_failure(status.failures, failure, recovery))


def correct_counts(status: TrainingJobStatus) -> TrainingJobStatus:
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
    return correct_counts(status.replaced(restarts=status.restarts.replaced(by_cause=by_cause)))


def find_first_rank(context: PlanContext, pod: str) -> int | None:
    """Return the first rank of this pod in the current generation; None if it has none there."""
    if context.current is None or not pod:
        return None
    places = (member.node_rank for member in context.current.members if member.pod_name == pod)
    place = next(places, None)
    return None if place is None else place * context.current.processes_per_node


def get_identity(entry: Interruption) -> tuple[int, int, str, str, bool]:
    """Return what identifies an entry while its other fields change."""
    return (entry.generation, entry.attempt, entry.time, entry.pod, entry.response is RecoveryResponse.IN_PLACE)


def find_open_membership_entry(status: PublicStatus, generation: int) -> int | None:
    """Return the index of the open interruption that ends this generation, or is about to; None without one."""
    for index, entry in enumerate(status.history):
        ends_it = entry.generation == generation and entry.response not in (
            RecoveryResponse.IN_PLACE,
            RecoveryResponse.STOP,
        )
        if ends_it and entry.recovered_seconds is None:
            return index
    return None


def replace_entry(status: TrainingJobStatus, index: int, entry: Interruption) -> TrainingJobStatus:
    """Replace the entry at `index`."""
    history = status.history
    return status.replaced(history=(*history[:index], entry, *history[index + 1 :]))


MAX_SUSPECTS = 16
"""Maximum number of workers lost at once whose nodes are recorded; enough for a rack, and the record stays small."""


def record_failed_members(
    context: PlanContext, status: TrainingJobStatus, failed_members: tuple[FailedMember, ...]
) -> TrainingJobStatus:
    """Open the interruption of the current generation, unless it is open or the next generation is decided."""
    if not failed_members or context.current is None:
        return status
    generation = context.current.generation
    if find_open_membership_entry(status, generation) is not None:
        return status.replaced(failures=_add_suspects(context, status, failed_members))
    if status.membership.generation != generation:
        return status
    first = failed_members[0]
    others = (
        ""
        if len(failed_members) == 1
        else f"; {len(failed_members)} workers: {format_names(_list_names(failed_members))}"
    )
    status = open_interruption(
        context,
        status,
        cause=first.cause,
        response=RecoveryResponse.REPLACE,
        message=first.message + others,
        failed_at=first.failed_at,
        member=first.member,
        suspected_node=first.suspected_node,
    )
    return status.replaced(failures=_add_suspects(context, status, failed_members), waiting_since=context.now)


def _add_suspects(
    context: PlanContext, memory: InternalStatus, failed_members: tuple[FailedMember, ...]
) -> tuple[FailureRecord, ...]:
    """Return the failures with the suspected nodes of all workers that failed together, without duplicates."""
    names = frozenset(_list_names(failed_members))
    recovery, recorded = context.job.spec.recovery, {record.pod for record in memory.failures if record.node}
    failures = memory.failures
    for failed in failed_members[:MAX_SUSPECTS]:
        pod = failed.member.pod_name
        if failed.suspected_node and pod not in recorded and is_recorded(failed.cause, recovery):
            earlier = [record.at for record in failures if record.node and record.pod in names]
            at = min(earlier, default=context.now)
            failure = FailureRecord(at=at, cause=failed.cause, pod=pod, node=failed.suspected_node)
            failures = record_failure(failures, failure, recovery)
    return failures


def _list_names(failed_members: tuple[FailedMember, ...]) -> tuple[str, ...]:
    return tuple(failed.member.pod_name for failed in failed_members)
