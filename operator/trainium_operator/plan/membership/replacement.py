"""Policy: replace lost members. A warm spare first, else a new pod, else (elastic jobs, after a wait) fewer nodes.

Invariants: survivors keep their ranks at the same size; while a replacement is awaited the survivors stay as they are;
a size is never below the job's floor nor illegal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.interruptions import Rung
from trainium_contract.wire.messages import Transition, WorkerPhase
from trainium_operator.plan.diagnose.process_failures import cause_of_standstill
from trainium_operator.plan.history.interruptions import open_interruption, open_membership_entry, replace_entry
from trainium_operator.plan.membership.compiled_size import size_at_hand
from trainium_operator.plan.membership.generation import Decision, NewGeneration
from trainium_operator.plan.membership.patience import makes_do_at
from trainium_operator.plan.membership.ranks import assign_ranks, surroundings_of
from trainium_operator.plan.view.extras import staying
from trainium_operator.plan.view.facts import newcomers_of

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.diagnose.loss import Loss
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker


_CREATION_ROUNDING = 1.0
"""Kubernetes cuts creation times to whole seconds: a pod made right after the failure may look older than it."""


def replace_lost(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> Decision:
    """The next generation without the lost members; none while too few workers are there."""
    assert facts.current is not None
    lost = {loss.member.pod_uid for loss in losses}
    survivors = tuple(member for member in facts.current.members if member.pod_uid not in lost)
    newcomers = newcomers_of(facts)
    available = len(survivors) + len(newcomers)
    deadline = _wait_until(facts, status, available, waited=all(loss.stays or not loss.missed for loss in losses))
    if deadline is not None:
        return Decision(status=status, looks=(deadline,))
    size = _size(facts, status, available)
    if size == 0:
        return Decision(status=status)
    members = assign_ranks(staying(facts, survivors, size), newcomers, size, surroundings_of(facts))
    used = {member.pod_uid for member in members}
    joined = tuple(worker for worker in newcomers if worker.pod.uid in used)
    saving = all(loss.saves for loss in losses if loss.cause is not Cause.FINISHED)
    new = NewGeneration(
        members=members,
        transition=Transition.GRACEFUL if saving else Transition.IMMEDIATE,
        cause=losses[0].cause,
    )
    return Decision(status=_with_rung(facts, status, size, joined), new=new)


def restart_stopped(facts: Facts, status: TrainingJobStatus) -> Decision:
    """The same members again, when all of them stopped and none of them says that it is the one that failed."""
    assert facts.current is not None
    beats = facts.beats
    if len(beats) < len(facts.current.members) or any(beat.phase is not WorkerPhase.FAILED for _, beat in beats):
        return Decision(status=status)
    cause = cause_of_standstill(facts)
    status = open_interruption(
        facts,
        status,
        cause=cause,
        rung=Rung.REPLACE,
        failed_at=facts.now,
        attempt=status.membership.attempt,
        message="all workers stopped, and none reported a failure of its own; they start again",
    )
    new = NewGeneration(members=facts.current.members, transition=Transition.IMMEDIATE, cause=cause)
    return Decision(status=status, new=new)


def _wait_until(facts: Facts, status: TrainingJobStatus, available: int, *, waited: bool) -> float | None:
    """Until when a replacement is awaited (Unix seconds); None when enough are there, or there was a wait already."""
    assert facts.current is not None
    if available >= min(status.desired, len(facts.current.members)) or waited:
        return None
    deadline = makes_do_at(facts, status)
    return deadline if facts.now < deadline else None


def _size(facts: Facts, status: PublicStatus, available: int) -> int:
    """The size of the next generation; 0 when no legal one is there."""
    assert facts.current is not None
    if available >= status.desired:
        return status.desired
    return size_at_hand(facts, status, min(available, len(facts.current.members)))


def _with_rung(facts: Facts, status: TrainingJobStatus, size: int, joined: tuple[Worker, ...]) -> TrainingJobStatus:
    """The status whose open interruption tells how it was answered."""
    assert facts.current is not None
    index = open_membership_entry(status, facts.current.generation)
    if index is None:
        return status
    entry = status.history[index]
    # A pod that was made because of a notice is no spare, although it was there before the rank was handed over.
    failed_at = min(entry.failed_at or facts.now, facts.job.status.leaving_since or facts.now)
    if size < len(facts.current.members):
        rung = Rung.SHRINK
    elif joined and all(worker.pod.created + _CREATION_ROUNDING <= failed_at for worker in joined):
        rung = Rung.SPARE
    else:
        rung = Rung.REPLACE
    return replace_entry(status, index, entry.replaced(rung=rung, pods_replaced=len(joined)))
