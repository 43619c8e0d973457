"""Which sizes have their graphs, as spares tell it and as the job itself has come to know.

Invariants: only of a job that compiles ahead, and only sizes that it may have; the list stays short: what comes when it
is full is not taken down, so that it comes to rest; with the last pod of a suspended job all is forgotten, for what it
will compute may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.sizes import MAX_COMPILED
from trainium_contract.status.public import CompiledStatus
from trainium_operator.plan.view.progress import newest_progress

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.facts import Facts


def note_compiled(facts: Facts, status: TrainingJobStatus) -> TrainingJobStatus:
    """Bring the sizes up to date; the status as it is where nothing is new."""
    if not facts.job.spec.precompile.enabled or not facts.workers:
        return status.replaced(compiled=CompiledStatus()) if status.compiled.sizes else status
    told = [each for worker in facts.workers.values() if worker.heartbeat for each in worker.heartbeat.compiled]
    known = dict.fromkeys((*status.compiled.sizes, *_by_the_job(facts)))
    workers = facts.job.spec.workers
    most = max(workers.replicas, workers.max_replicas or 0)
    fresh = [each for each in told if each.nodes not in known and each.nodes <= most and facts.size.passes(each.nodes)]
    sizes = tuple(dict.fromkeys((*known, *(each.nodes for each in fresh))))[:MAX_COMPILED]
    seconds = max((*(each.seconds for each in fresh if each.nodes in sizes), status.compiled.seconds or 0.0))
    return status.replaced(compiled=CompiledStatus(sizes=sizes, seconds=round(seconds, 1) if seconds else None))


def _by_the_job(facts: Facts) -> tuple[int, ...]:
    """What all workers have compiled before they joined, and the size in force once a step was made at it."""
    if facts.current is None:
        return ()
    progress = newest_progress(facts)
    stepped = progress is not None and progress.step > (progress.resume_step or 0)
    return (*facts.size.compiled_first, *((len(facts.members),) if stepped else ()))
