"""Policy: which members are lost, why, since when, and when to look again.

Invariants: loss is derived anew from what is there, so it survives a restart of the operator; a worker that merely
restarts its processes in place is not lost; nothing is attributed to the node of a user's error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import severity
from trainium_contract.faults.responses import Response
from trainium_contract.status.conditions import Phase
from trainium_operator.plan.diagnose.loss import Loss
from trainium_operator.plan.diagnose.node_health import hand_overs, unhealthy
from trainium_operator.plan.diagnose.not_joining import join_deadlines, not_joined
from trainium_operator.plan.diagnose.process_failures import accused, given_up_with, reported
from trainium_operator.plan.diagnose.silence import evidence_of_loss, failed_since, take_testimony
from trainium_operator.plan.diagnose.stragglers import slowest_to_hand_over
from trainium_operator.plan.faults.ends import cause_of_leaving, classify_pod_failure
from trainium_operator.plan.model.observed import SILENCE_TOLD_SECONDS, PodPhase

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.diagnose.silence import Testimony
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker


def find_losses(facts: Facts) -> tuple[tuple[Loss, ...], tuple[float, ...]]:
    """The lost members, the most telling cause first; and when to look again at those in doubt (Unix seconds)."""
    found: list[Loss] = []
    looks: list[float] = []
    testimony = take_testimony(facts)
    awaited = join_deadlines(facts)
    at_rest = _is_at_rest(facts)
    if at_rest:
        looks.append(facts.now + facts.status_interval)
    for member, worker in facts.members:
        join_by = awaited.get(member.node_rank)
        loss = _loss_of(facts, testimony, member, worker, join_by)
        if loss is not None:
            found.append(loss)
        elif worker is not None and not worker.finished:
            if not at_rest or _is_in_doubt(worker):
                looks.append(_next_look(facts, testimony, worker))
            if join_by is not None:
                looks.append(join_by)
    found = hand_overs(facts, testimony, accused(facts, found)) or slowest_to_hand_over(facts)
    if found and len(found) < len(facts.members):
        found += _finished_companions(facts, {loss.member.pod_uid for loss in found})
    return tuple(sorted(found, key=lambda loss: (severity(loss.cause), loss.member.node_rank))), tuple(looks)


def _loss_of(
    facts: Facts, testimony: Testimony, member: Member, worker: Worker | None, join_by: float | None
) -> Loss | None:
    if worker is None:
        agent = facts.observed.agents.get(member.pod_uid)
        since = agent.heard if agent is not None else failed_since(facts, None)
        message = f"pod {member.pod_name} on node {member.node_name} no longer exists"
        return Loss(member=member, worker=None, cause=Cause.POD_LOST, failed_at=since, message=message)
    if worker.finished:
        return None
    return (
        _ended(facts, member, worker)
        or _without_node(facts, member, worker)
        or reported(facts, member, worker)
        or _leaving(facts, member, worker)
        or unhealthy(facts, testimony, member, worker)
        or _silent(facts, testimony, member, worker)
        or not_joined(facts, member, worker, join_by)
    )


def _ended(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    pod = worker.pod
    if pod.phase not in (PodPhase.FAILED, PodPhase.SUCCEEDED):
        return None
    given_up = given_up_with(facts, worker)
    meaning = given_up[1] if given_up else classify_pod_failure(pod, facts.job.spec.recovery.rules)
    asked = pod.deleting and given_up is None and meaning.cause is not Cause.DEVICE
    blames = meaning.response is Response.REPLACE_NODE if given_up is None and not asked else None
    code = "" if pod.exit_code is None else f"exit code {pod.exit_code}"
    why = ", ".join(part for part in (pod.reason, code, pod.message) if part)
    return Loss(
        member=member,
        worker=worker,
        cause=cause_of_leaving(pod) if asked else meaning.cause,
        blames_node=blames,
        failed_at=pod.finished or facts.now,
        message=f"pod {pod.name} on node {pod.node} ended ({why or 'no reason given'})",
        force=worker.node_bad,
    )


def _without_node(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    if not worker.node_gone:
        return None
    state = "no longer exists" if worker.node is None else "was declared out of service"
    message = f"node {worker.pod.node} of pod {worker.pod.name} {state}"
    failed_at = failed_since(facts, worker)
    return Loss(member=member, worker=worker, cause=Cause.NODE_LOST, failed_at=failed_at, message=message, force=True)


def _leaving(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    if not worker.pod.deleting and not worker.pod.disrupted:
        return None
    answers = not worker.silent and not worker.node_bad and worker.agent is not None
    cause, problem = cause_of_leaving(worker.pod), facts.troubles.get(worker.pod.uid)
    seen = f": {problem}" if problem is not None and problem.cause is cause else ""
    return Loss(
        member=member,
        worker=worker,
        cause=cause,
        failed_at=facts.now if answers else failed_since(facts, worker),
        message=f"pod {worker.pod.name} on node {worker.pod.node} is being deleted or evicted{seen}",
        force=worker.node_bad,
        saves=answers,
    )


def _silent(facts: Facts, testimony: Testimony, member: Member, worker: Worker) -> Loss | None:
    if not worker.silent and not worker.refuses:
        return None
    evidence = evidence_of_loss(testimony, member, worker, facts.now)
    if evidence is None:
        return None
    # Whoever refuses a connection has power: the agent is gone, its machine is not.
    host_answers = worker.refuses and not worker.node_bad
    heard = "the time of the failure is when it was last heard"
    since = heard if worker.agent is not None else "this operator never heard it"
    message = (
        f"no word from pod {worker.pod.name} on node {worker.pod.node} for {worker.silent_seconds:.1f} s, and "
        f"{evidence}; {since}"
    )
    return Loss(
        member=member,
        worker=worker,
        cause=Cause.POD_LOST if host_answers else Cause.NODE_LOST,
        failed_at=failed_since(facts, worker),
        message=message,
        force=not host_answers,
    )


def _finished_companions(facts: Facts, lost: set[str]) -> list[Loss]:
    """Workers that finished before a peer was lost: their processes are gone, so the next generation replaces them."""
    return [
        Loss(
            member=member,
            worker=worker,
            cause=Cause.FINISHED,
            failed_at=facts.now,
            message=f"pod {member.pod_name} had finished already",
        )
        for member, worker in facts.members
        if worker is not None and worker.finished and member.pod_uid not in lost
    ]


def _is_at_rest(facts: Facts) -> bool:
    """It trains and nothing is being recovered from, so that only news can change anything."""
    status = facts.job.status
    return status.phase is Phase.RUNNING and all(entry.recovered_seconds is not None for entry in status.history)


def _is_in_doubt(worker: Worker) -> bool:
    """It was not heard lately; of others the coordinator tells when they fall silent."""
    return worker.agent is None or not worker.silent_seconds < SILENCE_TOLD_SECONDS < worker.timeout


def _next_look(facts: Facts, testimony: Testimony, worker: Worker) -> float:
    """When silence could become a loss: at its deadline, then whenever training would count as stalled."""
    deadline = facts.now - worker.silent_seconds + worker.timeout
    if worker.agent is None or not worker.silent:
        return max(deadline, facts.now)
    stalled = testimony.stalls_at
    return stalled if stalled is not None and stalled > facts.now else facts.now + facts.settings.heartbeat_seconds
