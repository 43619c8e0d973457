"""Policy: pods that end before their agent was heard make the next ones wait, longer each time until one is heard.

Whoever ends them (a kubelet that does not admit them, a container that cannot be made, an eviction at once) does so
within a second, so the pods that replace them would be made as fast. Nodes are no way out: many of these ends are
blamed on none.
Invariants: what is counted is rounds, not pods: a batch counts once, however many of it end so and whenever; the first
rounds cost no wait, so whoever is lost is replaced as fast as ever; a change of the job, a suspension or a pod that is
heard ends the wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.refusals import RefusalsStatus
from trainium_operator.plan.model.observed import PodPhase

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker

_FREE_ROUNDS = 2
_FIRST_PAUSE_SECONDS = 4.0
_LONGEST_PAUSE_SECONDS = 300.0
_FORGOTTEN_SECONDS = 600.0
"""After the longest pause, so that a job to which it happens again and again does not begin anew each time."""


def note_refused(facts: Facts, status: TrainingJobStatus) -> TrainingJobStatus:
    """Count the round in which pods ended so, or forget the rounds before."""
    known = status.refusals
    since = known.next_ordinal if known.next_ordinal <= status.next_pod_ordinal else 0  # ordinals began anew
    heard = known.rounds > 0 and any(
        worker.pod.ordinal >= since and worker.agent is not None and not worker.ended
        for worker in facts.workers.values()
    )
    changed = facts.job.status.observed_generation != facts.job.generation
    old = known.at is not None and facts.now >= known.at + _FORGOTTEN_SECONDS
    rounds = 0 if heard or changed or old else max(0, known.rounds)
    if any(worker.pod.ordinal >= since and _is_refused(worker) for worker in facts.outsiders):
        found = RefusalsStatus(rounds=rounds + 1, at=facts.now, next_ordinal=status.next_pod_ordinal)
        return status.replaced(refusals=found)
    if known.rounds and not rounds:
        return status.replaced(refusals=RefusalsStatus(next_ordinal=since))
    return status


def made_from(status: TrainingJobStatus, now: float) -> float:
    """When new pods may be made (Unix seconds)."""
    known = status.refusals
    late = known.rounds - _FREE_ROUNDS
    if known.at is None or late <= 0:
        return now
    return min(known.at, now) + min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(late - 1, 16))


def _is_refused(worker: Worker) -> bool:
    """It ended, nobody asked it to, and nobody was in it. Extras have a pause of their own (`idle_nodes`)."""
    pod = worker.pod
    return pod.phase is PodPhase.FAILED and worker.agent is None and not pod.deleting and not pod.extra
