"""Decide who trains next: the first generation, one without the failed members, the same again, or one of another size.

The first generation begins when enough workers are warm; an elastic job that lacks some begins smaller after
`rescaleAfterSeconds`. A failed member is replaced by a warm spare, else by a new pod, else (elastic jobs, after a wait)
the job shrinks. A job that had to shrink grows back when all workers are there; a size that a user requests is taken at
once. A generation that was decided on and never recorded, because the operator died between the two writes, is finished
by the members that are there once each of them was seen.

Guarantees:
- The first policy that wants a new generation gets it. This module alone writes `waitingSince`, except for its start
  with a failure (`history.interruptions`) and its end with the job's pods.
- Survivors keep their ranks at the same size, and stay as they are while a replacement is pending.
- A size is never below the job's floor nor illegal. Shrinking removes extras first, then the highest ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import Rung
from trainium_contract.wire.messages import Member, Transition, WorkerPhase
from trainium_operator.plan.diagnose.process_failures import cause_of_standstill
from trainium_operator.plan.history.interruptions import open_interruption, open_membership_entry, replace_entry
from trainium_operator.plan.membership import growth
from trainium_operator.plan.membership.generation import Decision, NewGeneration
from trainium_operator.plan.membership.ranks import assign_ranks, member_of, order_first_ranks, rank_context
from trainium_operator.plan.model.conditions import AnyShown, is_true, with_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import counted
from trainium_operator.plan.view.facts import Facts, healthy_joiners, list_joiners
from trainium_operator.plan.view.progress import is_settled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.diagnose.loss import Loss
    from trainium_operator.plan.view.workers import Worker


def form_first_generation(facts: Facts, status: TrainingJobStatus) -> Decision:
    """Form it at the desired size, or after `rescaleAfterSeconds` at the largest legal size that is there."""
    ready = facts.candidates
    size = status.desired
    if len(ready) < size:
        deadline = growth.rescale_at(facts, status)
        if facts.now < deadline:
            return Decision(status=status, requeue_at=(deadline,))
        size = growth.available_size(facts, status, len(ready))
    if size == 0:
        return Decision(status=status)
    ordered = order_first_ranks(ready, size, rank_context(facts))
    members = tuple(member_of(worker, rank) for rank, worker in enumerate(ordered))
    new = NewGeneration(members=members, transition=Transition.IMMEDIATE, cause=Cause.RESIZE)
    return Decision(status=status, new=new)


_CREATION_ROUNDING = 1.0
"""Kubernetes cuts creation times to whole seconds: a pod made right after the failure may look older than it."""


def replace_failed(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> Decision:
    """Form the next generation without the failed members; none while too few workers are available."""
    assert facts.current is not None
    lost = {loss.member.pod_uid for loss in losses}
    survivors = tuple(member for member in facts.current.members if member.pod_uid not in lost)
    newcomers = list_joiners(facts)
    available = len(survivors) + len(newcomers)
    deadline = _wait_until(facts, status, available, waited=all(loss.stays or not loss.missed for loss in losses))
    if deadline is not None:
        return Decision(status=status, requeue_at=(deadline,))
    size = _size(facts, status, available)
    if size == 0:
        return Decision(status=status)
    members = assign_ranks(staying(facts, survivors, size), newcomers, size, rank_context(facts))
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
    """Restart the same members, when all of them stopped and none reports that it is the one that failed."""
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
        message="all workers stopped, and none reported a failure; they start again",
    )
    new = NewGeneration(members=facts.current.members, transition=Transition.IMMEDIATE, cause=cause)
    return Decision(status=status, new=new)


def _wait_until(facts: Facts, status: TrainingJobStatus, available: int, *, waited: bool) -> float | None:
    """Return until when a replacement is awaited (Unix seconds).

    None when enough are there, or there was a wait already.
    """
    assert facts.current is not None
    if available >= min(status.desired, len(facts.current.members)) or waited:
        return None
    deadline = growth.rescale_at(facts, status)
    return deadline if facts.now < deadline else None


def _size(facts: Facts, status: PublicStatus, available: int) -> int:
    """Return the size of the next generation; 0 when no legal one is there."""
    assert facts.current is not None
    if available >= status.desired:
        return status.desired
    return growth.available_size(facts, status, min(available, len(facts.current.members)))


def _with_rung(facts: Facts, status: TrainingJobStatus, size: int, joined: tuple[Worker, ...]) -> TrainingJobStatus:
    """Record in the open interruption how it was recovered."""
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


def record_size_request(facts: Facts, status: AnyShown, desired: int) -> AnyShown:
    """Remember that the user changed the size; until it is reached, a change of size is theirs."""
    if facts.current is None or status.desired == 0 or status.desired - status.idle_nodes.taken == desired:
        return status
    message = f"from {len(facts.current.members)} to {counted(desired, 'node')}"
    return with_condition(status, ConditionType.RESIZING, True, Reason.SIZE_REQUESTED, message, now=facts.now)


def resize(facts: Facts, status: TrainingJobStatus) -> Decision:
    """Form the next generation at another size; none when the size fits, or not yet."""
    assert facts.current is not None
    present, desired = len(facts.current.members), status.desired
    if any(worker is not None and worker.finished for _, worker in facts.members):
        return Decision(status=status)
    if present == desired:
        return Decision(status=status)
    asked = is_true(status, ConditionType.RESIZING)
    newcomers = list_joiners(facts) if asked else healthy_joiners(facts)
    size, requeue_at = (desired, ()) if present > desired else _grown(facts, status, present, len(newcomers))
    if size == present:
        return Decision(status=status, requeue_at=requeue_at)
    survivors = staying(facts, facts.current.members, size)
    joined = joining(facts, survivors, newcomers, size, desired - status.idle_nodes.taken)
    members = assign_ranks(survivors, joined, size, rank_context(facts))
    new = NewGeneration(members=members, transition=Transition.GRACEFUL, cause=Cause.RESIZE)
    return Decision(status=_with_entry(facts, status, size), new=new, requeue_at=requeue_at)


def _grown(facts: Facts, status: TrainingJobStatus, present: int, newcomers: int) -> tuple[int, tuple[float, ...]]:
    """Return the size to grow to now, `present` when not yet; and when to look again (Unix seconds)."""
    if newcomers == 0 or not is_settled(facts):
        return present, ()
    resting = 0.0 if is_true(status, ConditionType.RESIZING) else growth.growth_resumes_at(facts, status)
    if facts.now < resting:
        return present, (resting,)
    asked = is_true(status, ConditionType.RESIZING)
    size = _target(facts, status, present, min(status.desired, present + newcomers), asked=asked)
    price = growth.compile_seconds(facts, status, size)
    if size <= present or not (asked or growth.is_worth_growing(facts, status, present, size, beside=price)):
        return present, ()
    paying = facts.now if asked else growth.pays_at(facts, status, size, _last_change(status))
    if facts.now < paying:
        return present, (paying,)
    if size == status.desired:
        return size, ()
    deadline = growth.rescale_at(facts, status)
    return (present, (deadline,)) if facts.now < deadline else (size, ())


def _target(facts: Facts, status: PublicStatus, present: int, nodes: int, *, asked: bool) -> int:
    """Return the size to grow to with so many nodes; a compiled one where that is growth."""
    size = nodes if nodes == status.desired else facts.size.legal_at_most(nodes)
    if asked or not growth.compile_seconds(facts, status, size):
        return size
    at_hand = growth.available_size(facts, status, nodes)
    return at_hand if at_hand > present else size


def _last_change(status: PublicStatus) -> float:
    """Return when the size in force was taken (Unix seconds), as far as the history goes back."""
    changes = (Rung.SHRINK, Rung.GROW, Rung.RESIZE)
    taken = [entry.decided_at for entry in status.history if entry.rung in changes and entry.decided_at is not None]
    return max(taken, default=0.0)


def _with_entry(facts: Facts, status: TrainingJobStatus, size: int) -> TrainingJobStatus:
    """Record this change of size, unless the generation in force is being left already."""
    assert facts.current is not None
    present = len(facts.current.members)
    if open_membership_entry(status, facts.current.generation) is not None:
        return status
    if status.membership.generation != facts.current.generation:
        return status
    requested = is_true(status, ConditionType.RESIZING)
    return open_interruption(
        facts,
        status,
        cause=Cause.RESIZE if requested else Cause.CAPACITY,
        rung=Rung.RESIZE if requested or size < present else Rung.GROW,
        failed_at=facts.now,
        attempt=status.membership.attempt,
        message=f"from {present} to {counted(size, 'node')}{_why(facts, status, size - present)}",
    )


def _why(facts: Facts, status: PublicStatus, more: int) -> str:
    if facts.grant is not None and status.desired < facts.size.desired:
        return f": the queue grants {status.desired} of {facts.size.desired}"
    taken = status.idle_nodes.taken
    if more > 0 and taken:
        return f": {taken} that were idle, beyond the {status.desired - taken} asked for"
    if more < 0 and facts.observed.wanted_elsewhere:
        return f": {-more} that were idle are given back, other jobs wait for {facts.observed.wanted_elsewhere}"
    return ""


def finish_decided_generation(facts: Facts, status: TrainingJobStatus) -> Decision:
    """Start the same members under the number that the status names, where that was not recorded."""
    current = facts.current
    if current is None or status.membership.generation <= current.generation:
        return Decision(status=status)
    if not all((worker is not None and worker.warm and not worker.finished) for _, worker in facts.members):
        return Decision(status=status)
    index = open_membership_entry(status, current.generation)
    cause = Cause.RESIZE if index is None else status.history[index].cause
    new = NewGeneration(members=current.members, transition=Transition.GRACEFUL, cause=cause)
    return Decision(status=status, new=new)


def decide_generation(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> Decision:
    """Return the decision; `status` has the interruption that the losses opened."""
    decision = _decided(facts, status, losses)
    since = _waiting_since(facts, status, decision.new, losses)
    return replace(decision, status=decision.status.replaced(waiting_since=since))


def _waiting_since(
    facts: Facts, status: TrainingJobStatus, new: NewGeneration | None, losses: tuple[Loss, ...]
) -> float | None:
    """Return since when the job waits for workers that it lacks (Unix seconds); None while it lacks none."""
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
        return replace_failed(facts, status, losses)
    requeue_at: tuple[float, ...] = ()
    for policy in (restart_stopped, resize, finish_decided_generation):
        decision = policy(facts, status)
        status, requeue_at = decision.status, requeue_at + decision.requeue_at
        if decision.new is not None:
            break
    return Decision(status=status, new=decision.new, requeue_at=requeue_at)


def staying(facts: Facts, members: Sequence[Member], size: int) -> tuple[Member, ...]:
    """Return at most `size` of the members: extras go first, then the highest ranks."""
    extra = {uid for uid, worker in facts.workers.items() if worker.pod.extra}
    kept = sorted(members, key=lambda member: (member.pod_uid in extra, member.node_rank))[:size]
    return tuple(sorted(kept, key=lambda member: member.node_rank))


def joining(
    facts: Facts, survivors: Sequence[Member], newcomers: tuple[Worker, ...], size: int, base: int
) -> tuple[Worker, ...]:
    """Return the joiners for the ranks up to `size`; those beyond `base` are for extras, so that spares stay."""
    extra = [worker for worker in newcomers if worker.pod.extra]
    if size <= base or not extra:
        return newcomers
    known = {member.pod_uid for member in survivors}
    taken = sum(worker.pod.extra for uid, worker in facts.workers.items() if uid in known)
    first = extra[: max(0, size - base - taken)]
    rest = [worker for worker in newcomers if worker not in first]
    return (*first, *rest)[: max(0, size - len(survivors))]
