"""Policy: members on bad nodes are lost, or hand their rank over (`node_signals` says what is wrong with a node).

A member on a node that is bad hands its rank over while it still answers: a spare takes it, else a pod made for it, and
until that one is warm the member trains on; only where a device is broken for good nothing is waited for. A node that
is merely not ready while its agent trains is left alone.
Invariants: derived anew from what is there; while the fleet is frozen (`FleetView.frozen`) no problem counts for more
than a preference; a worker that is certainly lost comes before one that could be handed over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.faults.node_polarity import Severity
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.diagnose.loss import Loss
from trainium_operator.plan.view.progress import is_settled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.diagnose.silence import Testimony
    from trainium_operator.plan.faults.node_signals import NodeProblem
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker


def unhealthy(facts: Facts, testimony: Testimony, member: Member, worker: Worker) -> Loss | None:
    """A member whose node is broken for good; it saves if it can, and nobody waits for a replacement."""
    problem = facts.troubles.get(worker.pod.uid)
    if problem is None or problem.severity is not Severity.FATAL:
        return None
    return _loss(facts, member, worker, problem, saves=_trains(facts, testimony, worker))


def hand_overs(facts: Facts, testimony: Testimony, found: list[Loss]) -> list[Loss]:
    """The losses with what the candidates that are free can take over from members on bad nodes.

    A member on a broken node that is handed over this way keeps its pod until its rank is elsewhere.
    """
    lost = {loss.member.pod_uid: loss for loss in found}
    fatal = [loss for loss in found if _is_fatal(facts, loss)]
    free = len(facts.candidates) - len(found)
    if free >= 0:
        found = [replace(loss, stays=loss.saves) if loss in fatal else loss for loss in found]
    for member, worker in members_to_move(facts):
        if free <= 0:
            break
        if member.pod_uid not in lost and not worker.silent and not worker.node_bad:
            saves = is_settled(facts) and _trains(facts, testimony, worker)
            problem = facts.troubles[worker.pod.uid]
            found.append(replace(_loss(facts, member, worker, problem, saves=saves), stays=saves))
            free -= 1
    return found


def members_to_move(facts: Facts) -> Iterator[tuple[Member, Worker]]:
    """Members that train on while somebody to take their rank is made ready, by rank."""
    for member, worker in facts.members:
        problem = facts.troubles.get(member.pod_uid)
        if worker is not None and problem is not None and problem.severity is Severity.DRAIN and worker.alive:
            yield member, worker


def _loss(facts: Facts, member: Member, worker: Worker, problem: NodeProblem, *, saves: bool) -> Loss:
    message = f"node {worker.pod.node} of pod {worker.pod.name} is bad: {problem}"
    if problem.message:
        message += f": {problem.message}"
    began = problem.since if problem.severity is Severity.FATAL else None  # the others train on until now
    return Loss(
        member=member,
        worker=worker,
        cause=problem.cause,
        failed_at=began if began is not None and worker.pod.created <= began <= facts.now else facts.now,
        message=message,
        force=worker.node_bad,
        saves=saves,
    )


def _is_fatal(facts: Facts, loss: Loss) -> bool:
    problem = facts.troubles.get(loss.member.pod_uid)
    return loss.worker is not None and loss.saves and problem is not None and problem.severity is Severity.FATAL


def _trains(facts: Facts, testimony: Testimony, worker: Worker) -> bool:
    """It answers and makes steps, so it can save before it leaves."""
    beat = worker.heartbeat
    if beat is None or worker.silent or worker.node_bad or beat.phase is not WorkerPhase.TRAINING:
        return False
    return not testimony.stalled(facts.now)
