"""Policy: after pods that end before their agent was seen, create fewer and later ones until one is seen.

A kubelet that does not admit them, a container that cannot be created, or an eviction ends such pods within a second,
so their replacements would be created as fast, and all at once.

Invariants:
- Rounds are counted, not pods: a batch counts once, however many of it end.
- The first rounds cost no wait, so a few lost pods are replaced quickly.
- After a round pods are created in batches, which start small and grow while all of a batch live. A pod that waits for
  a node delays none.
- New pods avoid a node that refused twice (`list_refusing_nodes`) for a while, but only a few nodes at most: if all
  refuse, the nodes are not the cause.
- A change of the job, a suspension or a pod that is seen ends the wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.start_failures import MAX_MESSAGE, MAX_NODES, StartFailureNode, StartFailuresStatus
from trainium_operator.backoff import compute_backoff
from trainium_operator.plan.model.observed import PodPhase, PodView
from trainium_operator.plan.model.text import format_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import InternalStatus
    from trainium_operator.plan.view.context import PlanContext
    from trainium_operator.plan.view.workers import Worker

_FREE_ROUNDS = 2
_FIRST_PAUSE_SECONDS = 4.0
_MAX_PAUSE_SECONDS = 300.0
_FORGOTTEN_SECONDS = 600.0
"""After the longest pause, so that the count survives between the rounds of a job that always fails."""
_IMMEDIATE_SECONDS = 20.0
"""A worker that has not ended by then was not refused at once, though its image may take longer."""
_FIRST_BATCH = 4
_BATCH_GROWTH = 4
_MAX_BATCH = 256
"""A batch of this size is not limited any more."""
_REFUSALS_OF_A_NODE = 2
_NODES_DIVISOR = 4
"""Divisor of the job's nodes: at most a fourth of them is avoided, and always one."""


def record_start_failures(context: PlanContext, memory: InternalStatus) -> StartFailuresStatus:
    """Count the round in which pods ended before their agent was seen, or drop earlier rounds."""
    previous = memory.start_failures
    first = previous.next_ordinal if previous.next_ordinal <= memory.next_pod_ordinal else 0  # ordinals restarted
    created = [worker for worker in context.workers.values() if worker.pod.ordinal >= first and not worker.pod.extra]
    has_started = previous.rounds > 0 and any(worker.agent is not None and not worker.ended for worker in created)
    is_changed = context.job.status.observed_generation != context.job.generation
    is_expired = previous.at is not None and context.now >= previous.at + _FORGOTTEN_SECONDS
    rounds = 0 if has_started or is_changed or is_expired else max(0, previous.rounds)
    nodes = () if is_changed else _count_refusals(context, previous.nodes)
    refused = [worker.pod for worker in context.non_members if worker.pod.ordinal >= first and _was_refused(worker)]
    if refused:
        last_refused = max(refused, key=lambda pod: pod.ordinal)
        return StartFailuresStatus(
            rounds=rounds + 1,
            at=context.now,
            next_ordinal=memory.next_pod_ordinal,
            batch=_FIRST_BATCH,
            message=_describe_end(last_refused)[:MAX_MESSAGE],
            nodes=nodes,
        )
    batch, at = (0 if is_changed or is_expired else max(0, previous.batch)), previous.at if rounds else None
    if batch and created and all(_is_never_refused(worker, context.now) for worker in created):
        batch = 0 if batch >= _MAX_BATCH else batch * _BATCH_GROWTH
        first = memory.next_pod_ordinal
    message = previous.message if rounds or batch else ""
    current = StartFailuresStatus(rounds=rounds, at=at, next_ordinal=first, batch=batch, message=message, nodes=nodes)
    recorded = previous.rounds or previous.batch or previous.nodes
    return current if recorded else previous


def find_next_creation(memory: InternalStatus, now: float) -> float:
    """Return when new pods may be created (Unix seconds)."""
    failures = memory.start_failures
    excess = failures.rounds - _FREE_ROUNDS
    if failures.at is None or excess <= 0:
        return now
    return min(failures.at, now) + compute_backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS, excess)


def describe_start_failures(status: TrainingJobStatus, now: float) -> str | None:
    """Return how the last pods ended, and when how many of the next are created; None while nothing is limited."""
    failures = status.start_failures
    create_at = find_next_creation(status, now)
    if create_at > now:
        times, limit = f", {failures.rounds} times in a row", f"at {format_rfc3339(create_at)}"
    elif failures.batch > 0:
        times, limit = "", f"{failures.batch} at a time until they run"
    else:
        return None
    reason = f"; the last one: {failures.message.strip()}" if failures.message else ""
    nodes = list_refusing_nodes(status, now)
    avoided = f"; new pods avoid {format_names(nodes)}, which refused twice or more" if nodes else ""
    return f"Pods ended before their agent reported{times}{reason}; the next are created {limit}{avoided}"


def limit_batch(context: PlanContext, status: TrainingJobStatus, missing: int) -> tuple[int, tuple[float, ...]]:
    """Return how many of the missing pods may be created now, and when to check again for more (Unix seconds).

    A gang waits for its last pod, so a part of it would never be seen: it is created as a whole.
    """
    failures = status.start_failures
    if failures.batch <= 0 or any(feature.creates_as_a_whole(context, status) for feature in context.features):
        return missing, ()
    starting = [
        worker.pod.created + _IMMEDIATE_SECONDS
        for worker in context.workers.values()
        if worker.pod.ordinal >= failures.next_ordinal
        and not (worker.pod.extra or worker.ended or _is_never_refused(worker, context.now))
    ]
    return min(missing, max(0, failures.batch - len(starting))), tuple(sorted(starting)[-1:])


def list_refusing_nodes(status: TrainingJobStatus, now: float) -> tuple[str, ...]:
    """Return nodes that refused twice within a while, the newest refusals first.

    At most a share of the job's nodes.
    """
    nodes = [
        entry
        for entry in status.start_failures.nodes
        if entry.times >= _REFUSALS_OF_A_NODE and now - _FORGOTTEN_SECONDS < entry.at <= now
    ]
    max_nodes = max(1, min(MAX_NODES, status.desired // _NODES_DIVISOR))
    return tuple(entry.node for entry in sorted(nodes, key=lambda entry: (-entry.at, entry.node))[:max_nodes])


def add_refusing_nodes(avoided: tuple[str, ...], status: TrainingJobStatus, now: float) -> tuple[str, ...]:
    """Return the nodes that new workers avoid, with those that refuse; at most 32, the status's limit."""
    return tuple(dict.fromkeys((*list_refusing_nodes(status, now), *reversed(avoided))))[:MAX_NODES][::-1]


def _count_refusals(
    context: PlanContext, previous_entries: tuple[StartFailureNode, ...]
) -> tuple[StartFailureNode, ...]:
    """Return which node refused how often: one pod counts once."""
    nodes = {
        entry.node: entry for entry in previous_entries if context.now - _FORGOTTEN_SECONDS < entry.at <= context.now
    }
    for worker in sorted(context.non_members, key=lambda worker: worker.pod.ordinal):
        pod = worker.pod
        previous = nodes.get(pod.node)
        has_run = pod.exit_code is not None or pod.init_exit_code is not None
        if not pod.node or has_run or not _was_refused(worker):
            continue
        if previous is None or previous.ordinal < pod.ordinal:
            times = 1 if previous is None else min(previous.times + 1, 1000)
            nodes[pod.node] = StartFailureNode(node=pod.node, times=times, at=context.now, ordinal=pod.ordinal)
    return tuple(_limit_nodes(nodes.values()))


def _describe_end(pod: PodView) -> str:
    code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
    return f"{pod.location} ended{code} ({pod.reason or 'Error'}): {pod.message or 'no message'}"


def _limit_nodes(nodes: Iterable[StartFailureNode]) -> list[StartFailureNode]:
    """Return the entries to keep: nodes that refused often, then those that refused last."""
    return sorted(
        sorted(nodes, key=lambda entry: (-entry.times, -entry.at, entry.node))[:MAX_NODES], key=lambda e: e.node
    )


def _was_refused(worker: Worker) -> bool:
    """Return whether it ended before its agent was seen, without a request.

    Extras have a separate back-off (`idle_nodes`).
    """
    pod = worker.pod
    return pod.phase is PodPhase.FAILED and worker.agent is None and not pod.deleting and not pod.extra


def _is_never_refused(worker: Worker, now: float) -> bool:
    """Return whether the pod runs, has reported, or has no node yet, so that no kubelet can refuse it."""
    pod = worker.pod
    if worker.ended:
        return False
    running = worker.agent is not None or pod.phase is PodPhase.RUNNING
    return running or (bool(pod.unschedulable_message) and not pod.node) or now >= pod.created + _IMMEDIATE_SECONDS
