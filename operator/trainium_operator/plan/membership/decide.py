"""Who trains next: the first generation, one without the lost, the same again, or one of another size.

Invariants: the first policy that wants a new generation gets it; since when the job waits for workers that it lacks is
written here alone, but for its beginning with a loss (`history.lost_members`) and its end with the job's pods.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_operator.plan.membership.first_generation import form_first_generation
from trainium_operator.plan.membership.generation import Decision, NewGeneration
from trainium_operator.plan.membership.replacement import replace_lost, restart_stopped
from trainium_operator.plan.membership.resize import resize
from trainium_operator.plan.membership.unfinished_generation import finish_decided

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.diagnose.loss import Loss
    from trainium_operator.plan.view.facts import Facts


def decide_generation(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> Decision:
    """The decision; `status` has the interruption that the losses began."""
    decision = _decided(facts, status, losses)
    since = _waiting_since(facts, status, decision.new, losses)
    return replace(decision, status=decision.status.replaced(waiting_since=since))


def _waiting_since(
    facts: Facts, status: TrainingJobStatus, new: NewGeneration | None, losses: tuple[Loss, ...]
) -> float | None:
    """Since when the job waits for workers that it lacks (Unix seconds); None while it lacks none."""
    since = facts.now if status.waiting_since is None else status.waiting_since
    if new is not None:
        return facts.now if len(new.members) < status.desired else None
    if facts.current is None:
        return since
    if losses or any(worker is not None and worker.finished for _, worker in facts.members):
        return status.waiting_since
    return None if len(facts.current.members) == status.desired else since


def _decided(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> Decision:
    if facts.current is None:
        return form_first_generation(facts, status)
    if losses:
        return replace_lost(facts, status, losses)
    looks: tuple[float, ...] = ()
    for policy in (restart_stopped, resize, finish_decided):
        decision = policy(facts, status)
        status, looks = decision.status, looks + decision.looks
        if decision.new is not None:
            break
    return Decision(status=status, new=decision.new, looks=looks)
