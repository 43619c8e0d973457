"""Policy: take note of restarts in place, which the agents do by themselves, also while the operator is away.

An attempt is taken into account once, when its culprit is known (`culprits`). Until then the other members' heartbeats
may still bring it; when all have spoken and none names one, nobody is blamed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause, ExitCode
from trainium_contract.job import Rung
from trainium_operator.plan.causes import severity
from trainium_operator.plan.culprits import find_culprit, records_of
from trainium_operator.plan.history import HISTORY_LENGTH, open_interruption

if TYPE_CHECKING:
    from trainium_operator.plan.culprits import Culprit
    from trainium_operator.plan.facts import Draft, Facts


def take_restarts(facts: Facts, draft: Draft, *, member_lost: bool) -> None:
    """Open an interruption for each attempt that has not been taken into account yet.

    While a member is lost, the others restart because of it: what nobody else caused belongs to that interruption.
    """
    if facts.current is None or draft.status.membership.generation != facts.current.generation:
        return
    newest = max((beat.attempt for _, beat in facts.beats), default=0)
    for attempt in range(max(draft.status.membership.attempt, newest - HISTORY_LENGTH), newest):
        all_spoke = not member_lost and _all_spoke(facts, newest)
        culprit = find_culprit(facts, attempt, all_spoke=all_spoke)
        if culprit is None and not member_lost and not all_spoke:
            draft.deadlines.append(facts.now + facts.settings.heartbeat_seconds)
            return
        if culprit is not None or not member_lost:
            _open(facts, draft, attempt, culprit)
        draft.update(membership=draft.status.membership.model_copy(update={"attempt": attempt + 1}))


def _open(facts: Facts, draft: Draft, attempt: int, culprit: Culprit | None) -> None:
    """Record that `attempt` was interrupted and the next one began."""
    record = culprit.record if culprit else next((record for _, record in records_of(facts, attempt + 1)), None)
    cause, message = _told(facts, attempt, culprit)
    open_interruption(
        facts,
        draft,
        cause=cause,
        rung=Rung.IN_PLACE,
        failed_at=record.failed_at if record else facts.now,
        attempt=attempt,
        pod=culprit.member.pod_name if culprit else "",
        node=culprit.member.node_name if culprit else "",
        suspect=culprit.member.node_name if culprit and _stood_still(culprit) else "",
        message=message,
        detected_seconds=max(0.0, record.detected_at - record.failed_at) if record else 0.0,
        step_before=record.step_before if record and record.step_before >= 0 else None,
    )


def _stood_still(culprit: Culprit) -> bool:
    """Its own agent says so; that it lagged behind the others is told, but too little to keep away from its node."""
    return culprit.failure is not None and culprit.failure.exit_code == ExitCode.HUNG


def _told(facts: Facts, attempt: int, culprit: Culprit | None) -> tuple[Cause, str]:
    if culprit is None:
        causes = {record.cause for _, record in records_of(facts, attempt + 1)}
        victims = sum(
            any((failure.generation, failure.attempt) == (beat.generation, attempt) for failure in beat.failures)
            for _, beat in facts.beats
        )
        told = f"{victims} workers lost a peer and " if victims else ""
        return (
            min(causes, key=severity, default=Cause.PEER_LOST),
            f"the processes restarted in place; {told}none reported a failure of its own, so no worker is blamed",
        )
    who = f"rank {culprit.failure.rank} in" if culprit.failure else "a process of"
    return culprit.cause, f"{who} pod {culprit.member.pod_name}, restarted in place: {culprit.why}"


def _all_spoke(facts: Facts, attempt: int) -> bool:
    """Whether every member that is heard at all has reported from this attempt on."""
    beats = {member.pod_uid: beat for member, beat in facts.beats}
    return all(
        worker is None or worker.silent or (member.pod_uid in beats and beats[member.pod_uid].attempt >= attempt)
        for member, worker in facts.members
    )
