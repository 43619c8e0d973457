"""Policy: pods that end before their agent was seen make the next ones fewer and later, until one is seen.

A worker that ends them (a kubelet that does not admit them, a container that cannot be made, an eviction at once)
does so within a second, so the pods that replace them would be made as fast, and all of them at once. Invariants:
what is counted is rounds, not pods: a batch counts once, however many of it end so and whenever. The first rounds
cost no wait, so a few who are lost are replaced as fast as ever. After a round pods are made in batches that begin
with a few and grow while all of a batch live; who waits for a node holds none of them up. A node that refused twice
is kept away from for a while (`refusing_nodes`), a few of them at most: where all refuse, it is not the nodes. A
change of the job, a suspension or a pod that is seen ends the wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.start_failures import MAX_MESSAGE, MAX_NODES, StartFailureNode, StartFailuresStatus
from trainium_operator.plan.model.observed import PodPhase, PodView
from trainium_operator.plan.model.text import listed, rfc3339

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import InternalStatus
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker

_FREE_ROUNDS = 2
_FIRST_PAUSE_SECONDS = 4.0
_LONGEST_PAUSE_SECONDS = 300.0
_FORGOTTEN_SECONDS = 600.0
"""After the longest pause, so that a job to which it happens again and again does not restarts each time."""
_AT_ONCE_SECONDS = 20.0
"""A worker that has not ended by then was not refused at once, though its image may take longer."""
_FIRST_BATCH = 4
_GROWTH = 4
_ALL = 256
"""A batch of so many is not held back any more."""
_REFUSALS_OF_A_NODE = 2
_LARGEST_SHARE = 4
"""Divisor of the job's nodes: at most the fourth part of them is avoided, and always one."""


def record_start_failures(facts: Facts, memory: InternalStatus) -> StartFailuresStatus:
    """Count the round in which pods ended before their agent was seen, or drop earlier rounds."""
    known = memory.start_failures
    since = known.next_ordinal if known.next_ordinal <= memory.next_pod_ordinal else 0  # ordinals restarted
    made = [worker for worker in facts.workers.values() if worker.pod.ordinal >= since and not worker.pod.extra]
    seen = known.rounds > 0 and any(worker.agent is not None and not worker.ended for worker in made)
    changed = facts.job.status.observed_generation != facts.job.generation
    old = known.at is not None and facts.now >= known.at + _FORGOTTEN_SECONDS
    rounds = 0 if seen or changed or old else max(0, known.rounds)
    nodes = () if changed else _counted(facts, known.nodes)
    refused = [worker.pod for worker in facts.outsiders if worker.pod.ordinal >= since and _is_refused(worker)]
    if refused:
        last = max(refused, key=lambda pod: pod.ordinal)
        return StartFailuresStatus(
            rounds=rounds + 1,
            at=facts.now,
            next_ordinal=memory.next_pod_ordinal,
            batch=_FIRST_BATCH,
            message=_end_of(last)[:MAX_MESSAGE],
            nodes=nodes,
        )
    batch, at = (0 if changed or old else max(0, known.batch)), known.at if rounds else None
    if batch and made and all(_lives(worker, facts.now) for worker in made):
        batch = 0 if batch >= _ALL else batch * _GROWTH
        since = memory.next_pod_ordinal
    message = known.message if rounds or batch else ""
    found = StartFailuresStatus(rounds=rounds, at=at, next_ordinal=since, batch=batch, message=message, nodes=nodes)
    recorded = known.rounds or known.batch or known.nodes
    return found if recorded else known


def next_creation_at(memory: InternalStatus, now: float) -> float:
    """Return when new pods may be made (Unix seconds)."""
    known = memory.start_failures
    late = known.rounds - _FREE_ROUNDS
    if known.at is None or late <= 0:
        return now
    return min(known.at, now) + min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(late - 1, 16))


def describe_start_failures(status: TrainingJobStatus, now: float) -> str | None:
    """Return how the last pods ended, and when and how many of the next are created; None while nothing is limited."""
    known = status.start_failures
    begins = next_creation_at(status, now)
    if begins > now:
        times, limit = f", {known.rounds} times in a row", f"at {rfc3339(begins)}"
    elif known.batch > 0:
        times, limit = "", f"{known.batch} at a time until they run"
    else:
        return None
    last = f"; the last one: {known.message.strip()}" if known.message else ""
    nodes = refusing_nodes(status, now)
    avoided = f"; new pods avoid {listed(nodes)}, which refused twice or more" if nodes else ""
    return f"Pods ended before their agent reported{times}{last}; the next are created {limit}{avoided}"


def limit_batch(facts: Facts, status: TrainingJobStatus, missing: int) -> tuple[int, tuple[float, ...]]:
    """Return how many of those that are missing may be made now, and when to look again for more (Unix seconds).

    A gang waits for its last pod, so a part of it would never be seen: it is made as a whole.
    """
    known = status.start_failures
    if known.batch <= 0 or any(each.creates_as_a_whole(facts, status) for each in facts.settings.features):
        return missing, ()
    under_way = [
        worker.pod.created + _AT_ONCE_SECONDS
        for worker in facts.workers.values()
        if worker.pod.ordinal >= known.next_ordinal
        and not (worker.pod.extra or worker.ended or _lives(worker, facts.now))
    ]
    return min(missing, max(0, known.batch - len(under_way))), tuple(sorted(under_way)[-1:])


def refusing_nodes(status: TrainingJobStatus, now: float) -> tuple[str, ...]:
    """Return nodes that refused twice within a while, those that refused last first.

    A share of the job's nodes at most.
    """
    nodes = [
        each
        for each in status.start_failures.nodes
        if each.times >= _REFUSALS_OF_A_NODE and now - _FORGOTTEN_SECONDS < each.at <= now
    ]
    most = max(1, min(MAX_NODES, status.desired // _LARGEST_SHARE))
    return tuple(each.node for each in sorted(nodes, key=lambda each: (-each.at, each.node))[:most])


def with_refusing(avoided: tuple[str, ...], status: TrainingJobStatus, now: float) -> tuple[str, ...]:
    """Return the nodes that new workers keep away from, with those that refuse; at most 32, as the status has them."""
    return tuple(dict.fromkeys((*refusing_nodes(status, now), *reversed(avoided))))[:MAX_NODES][::-1]


def _counted(facts: Facts, known: tuple[StartFailureNode, ...]) -> tuple[StartFailureNode, ...]:
    """Return who refused how often: a pod once, when its node refused it."""
    nodes = {each.node: each for each in known if facts.now - _FORGOTTEN_SECONDS < each.at <= facts.now}
    for worker in sorted(facts.outsiders, key=lambda worker: worker.pod.ordinal):
        pod = worker.pod
        before = nodes.get(pod.node)
        ran = pod.exit_code is not None or pod.init_exit_code is not None
        if not pod.node or ran or not _is_refused(worker):
            continue
        if before is None or before.ordinal < pod.ordinal:
            times = 1 if before is None else min(before.times + 1, 1000)
            nodes[pod.node] = StartFailureNode(node=pod.node, times=times, at=facts.now, ordinal=pod.ordinal)
    return tuple(_newest(nodes.values()))


def _end_of(pod: PodView) -> str:
    place = f"{pod.name} on node {pod.node}" if pod.node else pod.name
    code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
    return f"{place} ended{code} ({pod.reason or 'Error'}): {pod.message or 'no message'}"


def _newest(nodes: Iterable[StartFailureNode]) -> list[StartFailureNode]:
    """Return so many as are kept: those that refused often, then those that refused last."""
    return sorted(sorted(nodes, key=lambda each: (-each.times, -each.at, each.node))[:MAX_NODES], key=lambda e: e.node)


def _is_refused(worker: Worker) -> bool:
    """Return whether it ended unasked before its agent was seen. Extras have a separate back-off (`idle_nodes`)."""
    pod = worker.pod
    return pod.phase is PodPhase.FAILED and worker.agent is None and not pod.deleting and not pod.extra


def _lives(worker: Worker, now: float) -> bool:
    """Nobody will refuse it any more, or nobody can yet: it was seen or runs, or there is no node for it."""
    pod = worker.pod
    if worker.ended:
        return False
    running = worker.agent is not None or pod.phase is PodPhase.RUNNING
    return running or (bool(pod.unschedulable_message) and not pod.node) or now >= pod.created + _AT_ONCE_SECONDS
