"""Policy: take note of restarts in place, which the agents do by themselves, also while the operator is away.

An attempt is taken into account once, when its culprit is known: a process that failed for a reason of its own. Until
then the other members' heartbeats may still bring it; when all have spoken and none names one, nobody is blamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Blame, Cause, verdict_of
from trainium_contract.job import Rung
from trainium_operator.plan.history import HISTORY_LENGTH, open_interruption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.messages import Member, ProcessFailure, RestartRecord
    from trainium_operator.plan.facts import Draft, Facts


@dataclass(frozen=True, slots=True)
class Culprit:
    """The member whose process failed first for a reason of its own."""

    member: Member
    failure: ProcessFailure | None
    record: RestartRecord | None


def take_restarts(facts: Facts, draft: Draft, *, member_lost: bool) -> None:
    """Open an interruption for each attempt that has not been taken into account yet.

    While a member is lost, the others restart because of it: what nobody else caused belongs to that interruption.
    """
    if facts.current is None or draft.status.membership.generation != facts.current.generation:
        return
    newest = max((beat.attempt for _, beat in facts.beats), default=0)
    for attempt in range(max(draft.status.membership.attempt, newest - HISTORY_LENGTH), newest):
        culprit = _culprit_of(facts, attempt)
        if culprit is None and not member_lost and not _all_spoke(facts, newest):
            draft.deadlines.append(facts.now + facts.settings.heartbeat_seconds)
            return
        if culprit is not None or not member_lost:
            _open(facts, draft, attempt, culprit)
        draft.update(membership=draft.status.membership.model_copy(update={"attempt": attempt + 1}))


def _open(facts: Facts, draft: Draft, attempt: int, culprit: Culprit | None) -> None:
    """Record that `attempt` was interrupted and the next one began."""
    record = culprit.record if culprit else next(iter(records_of(facts, attempt + 1)), (None, None))[1]
    cause, message = _cause_of(culprit)
    open_interruption(
        facts,
        draft,
        cause=cause,
        rung=Rung.IN_PLACE,
        failed_at=record.failed_at if record else facts.now,
        attempt=attempt,
        pod=culprit.member.pod_name if culprit else "",
        node=culprit.member.node_name if culprit else "",
        message=message,
        detected_seconds=max(0.0, record.detected_at - record.failed_at) if record else 0.0,
        step_before=record.step_before if record and record.step_before >= 0 else None,
    )


def _cause_of(culprit: Culprit | None) -> tuple[Cause, str]:
    if culprit is None:
        return Cause.PEER_LOST, "the processes restarted in place; no worker reported a failure of its own"
    failure = culprit.failure
    if failure is None:
        cause = culprit.record.cause if culprit.record else Cause.CRASH
        return cause, f"a process of pod {culprit.member.pod_name} stopped ({cause.value}) and was restarted in place"
    verdict = verdict_of(failure.exit_code)
    return verdict.cause, (
        f"rank {failure.rank} in pod {culprit.member.pod_name} {verdict.sentence} (exit code {failure.exit_code}) "
        f"and was restarted in place; {failure.message}"
    )


def _culprit_of(facts: Facts, attempt: int) -> Culprit | None:
    records = {member.pod_uid: record for member, record in records_of(facts, attempt + 1)}
    failures = [
        (failure.at, member, failure)
        for member, beat in facts.beats
        for failure in beat.failures
        if failure.generation == beat.generation
        and failure.attempt == attempt
        and verdict_of(failure.exit_code).blame is not Blame.PEER
        and verdict_of(failure.exit_code).cause is not Cause.YIELDED
    ]
    if failures:
        _, member, failure = min(failures, key=lambda found: (found[1].pod_uid not in records, found[0]))
        return Culprit(member, failure, records.get(member.pod_uid))
    for member, record in records_of(facts, attempt + 1):
        if record.cause not in (Cause.PEER_LOST, Cause.YIELDED):
            return Culprit(member, None, record)
    return None


def records_of(facts: Facts, attempt: int) -> Iterator[tuple[Member, RestartRecord]]:
    """What the members recorded about the restart that began `attempt` of the generation in force."""
    for member, beat in facts.beats:
        for record in beat.restarts:
            if record.generation == beat.generation and record.attempt == attempt:
                yield member, record


def _all_spoke(facts: Facts, attempt: int) -> bool:
    """Whether every member that is heard at all has reported from this attempt on."""
    beats = {member.pod_uid: beat for member, beat in facts.beats}
    return all(
        worker is None or worker.silent or (member.pod_uid in beats and beats[member.pod_uid].attempt >= attempt)
        for member, worker in facts.members
    )
