"""Policy: replace lost members. A warm spare first, else a new pod, else (elastic jobs, after a wait) fewer nodes.

Invariants: survivors keep their ranks at the same size; a loss is noted and counted once per generation; while a
replacement is awaited the survivors stay as they are; a size is never below the job's floor nor illegal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause
from trainium_contract.job import Rung
from trainium_contract.messages import Transition, WorkerPhase
from trainium_operator.plan.generation import NewGeneration, newcomers_of
from trainium_operator.plan.history import open_interruption, open_membership_entry, record_suspects, replace_entry
from trainium_operator.plan.ranks import assign_ranks, surroundings_of
from trainium_operator.plan.reported import cause_of_standstill
from trainium_operator.plan.sentences import listed

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.losses import Loss
    from trainium_operator.plan.workers import Worker


_CREATION_ROUNDING = 1.0
"""Kubernetes cuts creation times to whole seconds: a pod made right after the failure may look older than it."""


def note_losses(facts: Facts, draft: Draft, losses: tuple[Loss, ...]) -> None:
    """Open the interruption of the generation in force, unless it is open already or its successor is decided."""
    assert facts.current is not None
    generation = facts.current.generation
    if open_membership_entry(draft.status, generation) is not None:
        record_suspects(facts, draft, losses)
        return
    if draft.status.membership.generation != generation:
        return
    first = losses[0]
    others = "" if len(losses) == 1 else f"; {len(losses)} workers: {listed(_names(losses))}"
    open_interruption(
        facts,
        draft,
        cause=first.cause,
        rung=Rung.REPLACE,
        failed_at=first.failed_at,
        attempt=draft.status.membership.attempt,
        pod=first.member.pod_name,
        node=first.member.node_name,
        suspect=first.suspect,
        message=first.message + others,
    )
    record_suspects(facts, draft, losses)
    draft.update(waiting_since=facts.now)


def replace_lost(facts: Facts, draft: Draft, losses: tuple[Loss, ...]) -> NewGeneration | None:
    """The next generation without the lost members; None while too few workers are there."""
    assert facts.current is not None
    lost = {loss.member.pod_uid for loss in losses}
    survivors = tuple(member for member in facts.current.members if member.pod_uid not in lost)
    newcomers = newcomers_of(facts)
    waited = all(loss.stays for loss in losses)
    size = _target(facts, draft, len(survivors) + len(newcomers), waited=waited)
    if size == 0:
        return None
    members = assign_ranks(survivors, newcomers, size, surroundings_of(facts))
    used = {member.pod_uid for member in members}
    joined = tuple(worker for worker in newcomers if worker.pod.uid in used)
    _name_rung(facts, draft, size, joined)
    saving = all(loss.saves for loss in losses if loss.cause is not Cause.FINISHED)
    return NewGeneration(
        members=members,
        transition=Transition.GRACEFUL if saving else Transition.IMMEDIATE,
        cause=losses[0].cause,
    )


def restart_stopped(facts: Facts, draft: Draft) -> NewGeneration | None:
    """The same members again, when all of them stopped and none of them says that it is the one that failed."""
    assert facts.current is not None
    beats = facts.beats
    if len(beats) < len(facts.current.members) or any(beat.phase is not WorkerPhase.FAILED for _, beat in beats):
        return None
    cause = cause_of_standstill(facts)
    open_interruption(
        facts,
        draft,
        cause=cause,
        rung=Rung.REPLACE,
        failed_at=facts.now,
        attempt=draft.status.membership.attempt,
        message="all workers stopped, and none reported a failure of its own; they start again",
    )
    return NewGeneration(members=facts.current.members, transition=Transition.IMMEDIATE, cause=cause)


def _target(facts: Facts, draft: Draft, available: int, *, waited: bool) -> int:
    """The size of the next generation; 0: wait, unless there was a wait already."""
    assert facts.current is not None
    desired, present = draft.status.desired, len(facts.current.members)
    if available >= desired:
        return desired
    if available >= present:
        return facts.size.legal_at_most(present)
    deadline = (draft.status.waiting_since or facts.now) + facts.job.spec.recovery.rescale_after_seconds
    if facts.now < deadline and not waited:
        draft.deadlines.append(deadline)
        return 0
    return facts.size.legal_at_most(available)


def _name_rung(facts: Facts, draft: Draft, size: int, joined: tuple[Worker, ...]) -> None:
    assert facts.current is not None
    index = open_membership_entry(draft.status, facts.current.generation)
    if index is None:
        return
    entry = draft.status.history[index]
    # A pod that was made because of a notice is no spare, although it was there before the rank was handed over.
    failed_at = min(entry.failed_at or facts.now, facts.job.status.leaving_since or facts.now)
    if size < len(facts.current.members):
        rung = Rung.SHRINK
    elif joined and all(worker.pod.created + _CREATION_ROUNDING <= failed_at for worker in joined):
        rung = Rung.SPARE
    else:
        rung = Rung.REPLACE
    replace_entry(draft, index, entry.model_copy(update={"rung": rung, "pods_replaced": len(joined)}))


def _names(losses: tuple[Loss, ...]) -> tuple[str, ...]:
    return tuple(loss.member.pod_name for loss in losses)
