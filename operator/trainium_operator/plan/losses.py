"""Policy: which members are lost, why, since when, and when to look again.

Invariants: loss is derived anew from what is there, so it survives a restart of the operator; a worker that merely
restarts its processes in place is not lost; nothing is put down to the node of a user's error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause, Response, verdict_of
from trainium_operator.plan.causes import cause_of_failed_pod, severity, suspects_node
from trainium_operator.plan.evidence import evidence_of_loss, take_testimony
from trainium_operator.plan.model import PodPhase

if TYPE_CHECKING:
    from trainium_contract.messages import Member, ProcessFailure
    from trainium_operator.plan.evidence import Testimony
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.workers import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One member that cannot go on."""

    member: Member
    worker: Worker | None
    """None when its pod is gone."""
    cause: Cause
    failed_at: float
    """Unix seconds, as well as it is known; for a silent worker an upper bound of its life: when it was last heard."""
    message: str
    force: bool = False
    """Its node cannot confirm a deletion."""
    saves: bool = False
    """It is leaving on request and still answers: all ranks may save before they leave."""

    @property
    def suspect(self) -> str:
        """The node to keep away from; empty when none is suspected."""
        return self.member.node_name if suspects_node(self.cause) else ""


def find_losses(facts: Facts, draft: Draft) -> tuple[Loss, ...]:
    """The lost members, the most telling cause first; sets the time of the next look for those in doubt."""
    found = []
    testimony = take_testimony(facts)
    for member, worker in facts.members:
        loss = _loss_of(facts, testimony, member, worker)
        if loss is not None:
            found.append(loss)
        elif worker is not None and not worker.finished:
            draft.deadlines.append(_next_look(facts, testimony, worker))
    if found and len(found) < len(facts.members):
        found += _finished_companions(facts, {loss.member.pod_uid for loss in found})
    return tuple(sorted(found, key=lambda loss: (severity(loss.cause), loss.member.node_rank)))


def _loss_of(facts: Facts, testimony: Testimony, member: Member, worker: Worker | None) -> Loss | None:
    if worker is None:
        agent = facts.observed.agents.get(member.pod_uid)
        since = agent.heard if agent is not None else facts.now
        message = f"pod {member.pod_name} on node {member.node_name} no longer exists"
        return Loss(member=member, worker=None, cause=Cause.POD_LOST, failed_at=since, message=message)
    if worker.finished:
        return None
    return (
        _ended(facts, member, worker)
        or _without_node(facts, member, worker)
        or _gave_up(facts, member, worker)
        or _leaving(facts, member, worker)
        or _silent(facts, testimony, member, worker)
    )


def _ended(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    pod = worker.pod
    if pod.phase not in (PodPhase.FAILED, PodPhase.SUCCEEDED):
        return None
    failure = _verdict(worker)
    cause = verdict_of(failure.exit_code).cause if failure else cause_of_failed_pod(pod)
    if pod.deleting and failure is None and not (pod.exit_code and verdict_of(pod.exit_code).cause is Cause.DEVICE):
        cause = Cause.PREEMPTED
    code = "" if pod.exit_code is None else f"exit code {pod.exit_code}"
    why = ", ".join(part for part in (pod.reason, code, pod.message) if part)
    return Loss(
        member=member,
        worker=worker,
        cause=cause,
        failed_at=pod.finished or facts.now,
        message=f"pod {pod.name} on node {pod.node} ended ({why or 'no reason given'})",
        force=worker.node_bad,
    )


def _without_node(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    if not worker.node_gone:
        return None
    message = f"node {worker.pod.node} of pod {worker.pod.name} no longer exists"
    failed_at = facts.now - worker.silent_seconds
    return Loss(member=member, worker=worker, cause=Cause.NODE_LOST, failed_at=failed_at, message=message, force=True)


def _gave_up(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    """The agent stopped restarting in place, or a process reported a fault that only another node can cure."""
    failure = _verdict(worker) or _device_fault(facts, worker)
    if failure is None:
        return None
    verdict = verdict_of(failure.exit_code)
    cause = Cause.CRASH if verdict.cause is Cause.PEER_LOST else verdict.cause
    message = (
        f"rank {failure.rank} of pod {worker.pod.name} on node {worker.pod.node}: {verdict.sentence} "
        f"(exit code {failure.exit_code}) {failure.message}"
    )
    return Loss(member=member, worker=worker, cause=cause, failed_at=_seen(facts, worker), message=message)


def _leaving(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    if not worker.pod.deleting:
        return None
    answers = not worker.silent and not worker.node_bad and worker.agent is not None
    return Loss(
        member=member,
        worker=worker,
        cause=Cause.PREEMPTED,
        failed_at=facts.now if answers else facts.now - worker.silent_seconds,
        message=f"pod {worker.pod.name} on node {worker.pod.node} is being deleted or evicted",
        force=worker.node_bad,
        saves=answers,
    )


def _silent(facts: Facts, testimony: Testimony, member: Member, worker: Worker) -> Loss | None:
    if not worker.silent:
        return None
    evidence = evidence_of_loss(testimony, member, worker, facts.now)
    if evidence is None:
        return None
    message = (
        f"no word from pod {worker.pod.name} on node {worker.pod.node} for {worker.silent_seconds:.1f} s, and "
        f"{evidence}; the time of the failure is when it was last heard"
    )
    return Loss(
        member=member,
        worker=worker,
        cause=Cause.NODE_LOST,
        failed_at=facts.now - worker.silent_seconds,
        message=message,
        force=True,
    )


def _verdict(worker: Worker) -> ProcessFailure | None:
    return worker.heartbeat.verdict if worker.gave_up and worker.heartbeat is not None else None


def _device_fault(facts: Facts, worker: Worker) -> ProcessFailure | None:
    beat = worker.heartbeat
    if beat is None or facts.current is None:
        return None
    return next(
        (
            failure
            for failure in beat.failures
            if failure.generation == facts.current.generation
            and verdict_of(failure.exit_code).response is Response.REPLACE_NODE
        ),
        None,
    )


def _seen(facts: Facts, worker: Worker) -> float:
    return worker.agent.heard if worker.agent is not None else facts.now


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


def _next_look(facts: Facts, testimony: Testimony, worker: Worker) -> float:
    """When silence could become a loss: at its deadline, then whenever training would count as stalled."""
    deadline = facts.now - worker.silent_seconds + worker.timeout
    if worker.agent is None or not worker.silent:
        return max(deadline, facts.now)
    stalled = testimony.stalls_at
    return stalled if stalled is not None and stalled > facts.now else facts.now + facts.settings.heartbeat_seconds
