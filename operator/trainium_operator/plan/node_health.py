"""Policy: what a job does about the health of its nodes (what is wrong with one is `node_signals`' affair).

A member on a node that is bad hands its rank over while it still answers: a spare takes it, else a pod made for it, and
until that one is warm the member trains on; only where a device is broken for good nothing is waited for. A node that
is merely not ready while its agent trains is left alone. Spares and newcomers on bad nodes are replaced, and new pods
keep away from them, and from a node that has just gone dark for as long as Kubernetes may still take it for ready.
Invariants: derived anew from what is there; while the fleet is frozen (`FleetView.frozen`) no problem counts for more
than a preference; a worker that is certainly lost comes before one that could be handed over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause
from trainium_contract.job import ConditionType
from trainium_contract.messages import WorkerPhase
from trainium_operator.plan.generation import is_settled
from trainium_operator.plan.loss import Loss
from trainium_operator.plan.node_signals import LABEL_HOST, Severity
from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.times import rfc3339
from trainium_operator.plan.troubles import quarantined_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.messages import Member
    from trainium_operator.plan.evidence import Testimony
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.node_signals import NodeProblem
    from trainium_operator.plan.workers import Worker

MOST_FORBIDDEN = 128
"""Nodes that a pod's affinity names at most: a longer list would make each pod large for little."""
_SHOWN = 3
_DARK_SECONDS = 300.0
"""For how long new pods keep away from a node that went dark; by then Kubernetes has marked it and its scheduler keeps
away by itself (after --node-monitor-grace-period of kube-controller-manager: 50 s unless it was raised)."""


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


def forbidden_nodes(facts: Facts, draft: Draft) -> tuple[str, ...]:
    """Host names of nodes that no new pod may be put on; those that this job knows to be bad come first."""
    bad = _bad_nodes(facts)
    dark = _dark_nodes(facts, draft) - set(bad)
    released = released_nodes(facts) if dark else frozenset()
    return (*bad, *sorted(dark - released))[:MOST_FORBIDDEN]


def released_nodes(facts: Facts) -> frozenset[str]:
    """Host names of nodes that pods which find no node keep away from, and need not any longer.

    Among them those that are merely dark: such a pod has nowhere else to go, and is made anew without that demand.
    """
    pods = (worker.pod for worker in facts.outsiders)
    waiting = [pod for pod in pods if pod.kept_from and pod.unschedulable_message and not pod.node]
    if not waiting:
        return frozenset()
    bad = _bad_nodes(facts)
    if len(bad) == MOST_FORBIDDEN:
        return frozenset()  # what is not named may be bad all the same
    there = {node.labels.get(LABEL_HOST, name) for name, node in facts.observed.nodes.items()}
    kept_from = frozenset[str]().union(*(pod.kept_from for pod in waiting))
    return kept_from & there - set(bad)


def _bad_nodes(facts: Facts) -> tuple[str, ...]:
    """Host names of nodes that are bad by what is known of them, or in quarantine."""
    bad = {
        worker.pod.node
        for worker in facts.workers.values()
        if (problem := facts.troubles.get(worker.pod.uid)) is not None and problem.severity >= Severity.DRAIN
    }
    names = [*sorted(bad), *sorted(quarantined_nodes(facts) - bad)][:MOST_FORBIDDEN]
    return tuple(_host_name(facts, name) for name in names)


def _dark_nodes(facts: Facts, draft: Draft) -> frozenset[str]:
    """Host names of nodes that went dark a moment ago, also by this very plan.

    To prefer others is not enough: a scheduler that favours near neighbours may put a new pod back on the node that was
    just lost.
    """
    if facts.observed.fleet.frozen:
        return frozenset()
    since = facts.now - _DARK_SECONDS
    lost = (record for record in draft.status.failures if record.cause is Cause.NODE_LOST and record.at > since)
    return frozenset(_host_name(facts, record.node) for record in lost if record.node)


def note_nodes(facts: Facts, draft: Draft) -> None:
    """The condition NodesHealthy, and the times at which a problem that is still young will count."""
    draft.deadlines += facts.counts_from
    if not facts.observed.nodes:
        return
    frozen = facts.observed.fleet.frozen
    found: dict[str, NodeProblem] = {}
    for uid, problem in facts.troubles.items():
        found.setdefault(facts.workers[uid].pod.node, problem)
    if not found:
        reason = Reason.NODE_ACTIONS_FROZEN if frozen else Reason.NODES_HEALTHY
        draft.condition(ConditionType.NODES_HEALTHY, True, reason, frozen or "nothing is wrong with the nodes in use")
        return
    worst = sorted(found, key=lambda node: (-found[node].severity, node))
    told = "; ".join(_told(node, found[node]) for node in worst[:_SHOWN])
    more = f"; and {len(worst) - _SHOWN} more nodes" if len(worst) > _SHOWN else ""
    reason = Reason.NODE_ACTIONS_FROZEN if frozen else Reason.NODE_UNHEALTHY
    message = f"{told}{more}. {frozen}" if frozen else told + more
    draft.condition(ConditionType.NODES_HEALTHY, False, reason, message)


def _host_name(facts: Facts, node: str) -> str:
    known = facts.observed.nodes.get(node)
    return node if known is None else known.labels.get(LABEL_HOST, node)


def _told(node: str, problem: NodeProblem) -> str:
    since = f" since {rfc3339(problem.since)}" if problem.since is not None else ""
    answer = {
        Severity.FATAL: "its workers are replaced",
        Severity.DRAIN: "its workers are handed over",
        Severity.SUSPECT: "other nodes are preferred",
    }
    return f"{node}: {problem}{since} ({problem.cause.value}; {answer[problem.severity]})"


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
    return testimony.stalls_at is None or facts.now < testimony.stalls_at
