"""Policy: members that are lost because of what their own processes report; finders for `losses`.

A member whose agent gave up, whose device broke, or who alone reports the same time-out again and again cannot stay.
Invariants: who only lost a peer is not lost for it, also when its agent was the one that gave up: then the culprit is,
and if none is known all start again as a new generation (`replacement.restart_stopped`) and no node is suspected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import default_responses
from trainium_contract.faults.responses import Response
from trainium_operator.plan.diagnose.culprits import find_culprit, reported_alone, signs_of
from trainium_operator.plan.diagnose.loss import Loss
from trainium_operator.plan.faults.ends import meaning_of_failure

if TYPE_CHECKING:
    from trainium_contract.faults.classify import Verdict
    from trainium_contract.wire.messages import HeartbeatRequest, Member, ProcessFailure
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker

_REPLACES = (Response.REPLACE_NODE, Response.REPLACE_WORKER)


def reported(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    """The agent stopped restarting in place, or a process reported a fault that only another node can cure."""
    beat = worker.heartbeat
    if beat is None or not (beat.failures or beat.verdict):
        return None
    given_up = given_up_with(facts, worker)
    if given_up is not None and not given_up[1].indirect:
        return _loss(facts, member, worker, *given_up)
    broken = _broken(facts, beat)
    if broken is not None:
        return _loss(facts, member, worker, *broken)
    alone = reported_alone(facts, member, beat)
    if alone is None:
        return None
    failure, meaning = alone
    return _loss(facts, member, worker, failure, meaning, again=", and no other worker did, more than once")


def accused(facts: Facts, found: list[Loss]) -> list[Loss]:
    """The losses, with the culprit of what made an agent give up that had only lost its peers."""
    if found:
        return found
    for _, beat in facts.beats:
        failure = beat.verdict
        if failure is None or not meaning_of_failure(beat, failure, facts.job.spec.recovery.rules).indirect:
            continue
        culprit = find_culprit(facts, failure.attempt, all_spoke=True)
        worker = facts.workers.get(culprit.member.pod_uid) if culprit is not None else None
        if culprit is None or worker is None or default_responses(culprit.cause).repeated is not Response.REPLACE_NODE:
            return found
        message = f"pod {culprit.member.pod_name} on node {culprit.member.node_name}: {culprit.why}"
        return [
            Loss(
                member=culprit.member,
                worker=worker,
                cause=culprit.cause,
                failed_at=_seen(facts, worker),
                message=message,
            )
        ]
    return found


def given_up_with(facts: Facts, worker: Worker) -> tuple[ProcessFailure, Verdict] | None:
    """The failure that made a worker's agent give up, and what it stands for."""
    beat = worker.heartbeat
    if beat is None or beat.verdict is None or not worker.gave_up:
        return None
    return beat.verdict, meaning_of_failure(beat, beat.verdict, facts.job.spec.recovery.rules)


def cause_of_standstill(facts: Facts) -> Cause:
    """What a generation is attributed to that stopped although no member reported a failure of its own.

    When the agents say that they gave up because their peers were lost to them, that is what connects them.
    """
    rules = facts.job.spec.recovery.rules
    verdicts = [meaning_of_failure(beat, beat.verdict, rules) for _, beat in facts.beats if beat.verdict is not None]
    return Cause.NETWORK if verdicts and all(meaning.indirect for meaning in verdicts) else Cause.CRASH


def _broken(facts: Facts, beat: HeartbeatRequest) -> tuple[ProcessFailure, Verdict] | None:
    """A failure of the generation in force that asks for another worker at once."""
    if facts.current is None:
        return None
    for failure in beat.failures:
        if failure.generation == facts.current.generation:
            meaning = meaning_of_failure(beat, failure, facts.job.spec.recovery.rules)
            if meaning.response in _REPLACES:
                return failure, meaning
    return None


def _loss(
    facts: Facts, member: Member, worker: Worker, failure: ProcessFailure, meaning: Verdict, *, again: str = ""
) -> Loss:
    message = (
        f"rank {failure.rank} of pod {worker.pod.name} on node {worker.pod.node}: {meaning.sentence} "
        f"({signs_of(failure)}){again}; {failure.message}"
    )
    return Loss(
        member=member,
        worker=worker,
        cause=meaning.cause,
        failed_at=_seen(facts, worker),
        message=message,
        blames_node=meaning.response is Response.REPLACE_NODE if meaning.response in _REPLACES else None,
    )


def _seen(facts: Facts, worker: Worker) -> float:
    return worker.agent.heard if worker.agent is not None else facts.now
