"""Decide who trains next: the first generation, one without the failed members, the same again, or one of another size.

The first generation begins when enough workers are warm; an elastic job that lacks some begins smaller after
`rescaleAfterSeconds`. A failed member is replaced by a warm spare, else by a new pod, else (elastic jobs, after a wait)
the job shrinks. A job that had to shrink grows back when all workers are there; a size that a user requests is taken at
once. A generation that was decided on and never recorded, because the operator died between the two writes, is finished
by the members that are there once each of them was seen. One that only agents or checkpoints know, because the state of
the cluster was restored from a backup, is replaced by a higher one.

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
from trainium_contract.pages.formatting import pluralize
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.wire.messages import Member, Transition, WorkerPhase
from trainium_operator.plan.diagnose.process_failures import find_stop_cause
from trainium_operator.plan.history.interruptions import (
    find_open_membership_entry,
    open_interruption,
    replace_entry,
)
from trainium_operator.plan.membership import growth
from trainium_operator.plan.membership.generation import Decision, NewGeneration, find_newest_generation
from trainium_operator.plan.membership.ranks import assign_ranks, build_member, build_rank_placement, order_first_ranks
from trainium_operator.plan.model.conditions import StatusT, is_true, set_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.context import PlanContext, is_start_blocked, list_healthy_joiners, list_joiners
from trainium_operator.plan.view.units import complete_units
from trainium_operator.plan.view.workers import RECONNECT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.diagnose.failed_member import FailedMember
    from trainium_operator.plan.view.workers import Worker


def form_first_generation(context: PlanContext, status: TrainingJobStatus) -> Decision:
    """Form it at the desired size, or after `rescaleAfterSeconds` at the largest legal size that is available."""
    if is_start_blocked(context):
        return Decision(status=status)
    ready = context.candidates
    size = status.desired
    if len(ready) < size:
        deadline = growth.find_rescale_time(context, status)
        if context.now < deadline:
            return Decision(status=status, requeue_at=(deadline,))
        size = growth.find_available_size(context, status, len(ready))
    if size == 0:
        return Decision(status=status)
    ordered = order_first_ranks(ready, size, build_rank_placement(context))
    members = tuple(build_member(worker, rank) for rank, worker in enumerate(ordered))
    new = NewGeneration(members=members, transition=Transition.IMMEDIATE, cause=Cause.RESIZE)
    return Decision(status=status, new=new)


_CREATION_ROUNDING = 1.0
"""Kubernetes truncates creation times to seconds, so a pod created right after the failure may look older than it."""


def replace_failed(
    context: PlanContext, status: TrainingJobStatus, failed_members: tuple[FailedMember, ...]
) -> Decision:
    """Form the next generation without the failed members, or wait while too few workers are available."""
    assert context.current is not None
    failed_uids = {failed.member.pod_uid for failed in failed_members}
    survivors = tuple(member for member in context.current.members if member.pod_uid not in failed_uids)
    survivors, returned = complete_units(survivors, context.workers, context.joinable, context.unit_nodes)
    newcomers = (*returned, *list_joiners(context))
    available = len(survivors) + len(newcomers)
    deadline = _wait_until(
        context,
        status,
        available,
        skip_wait=all(failed.keeps_pod or not failed.awaits_replacement for failed in failed_members),
    )
    if deadline is not None:
        return Decision(status=status, requeue_at=(deadline,))
    size = _choose_next_size(context, status, available)
    if size == 0:
        return Decision(status=status)
    members = assign_ranks(select_survivors(context, survivors, size), newcomers, size, build_rank_placement(context))
    member_uids = {member.pod_uid for member in members}
    joined = tuple(worker for worker in newcomers if worker.pod.uid in member_uids)
    all_can_save = all(failed.can_save for failed in failed_members if failed.cause is not Cause.FINISHED)
    new = NewGeneration(
        members=members,
        transition=Transition.GRACEFUL if all_can_save else Transition.IMMEDIATE,
        cause=failed_members[0].cause,
    )
    return Decision(status=_record_response(context, status, size, joined), new=new)


def restart_stopped(context: PlanContext, status: TrainingJobStatus) -> Decision:
    """Restart the same members if all of them stopped and none reports that it failed."""
    assert context.current is not None
    heartbeats = context.heartbeats
    if len(heartbeats) < len(context.current.members) or any(
        heartbeat.phase is not WorkerPhase.FAILED for _, heartbeat in heartbeats
    ):
        return Decision(status=status)
    cause = find_stop_cause(context)
    message = "all workers stopped, and none reported a failure; they start again"
    status = open_interruption(context, status, cause=cause, response=RecoveryResponse.REPLACE, message=message)
    new = NewGeneration(members=context.current.members, transition=Transition.IMMEDIATE, cause=cause)
    return Decision(status=status, new=new)


def _wait_until(context: PlanContext, status: TrainingJobStatus, available: int, *, skip_wait: bool) -> float | None:
    """Return until when a replacement is awaited (Unix seconds).

    None if enough are available, or if the wait is over.
    """
    assert context.current is not None
    if available >= min(status.desired, len(context.current.members)) or skip_wait:
        return None
    deadline = growth.find_rescale_time(context, status)
    return deadline if context.now < deadline else None


def _choose_next_size(context: PlanContext, status: PublicStatus, available: int) -> int:
    """Return the size of the next generation; 0 if no legal one is available."""
    assert context.current is not None
    if available >= status.desired:
        return status.desired
    return growth.find_available_size(context, status, min(available, len(context.current.members)))


def _record_response(
    context: PlanContext, status: TrainingJobStatus, size: int, joined: tuple[Worker, ...]
) -> TrainingJobStatus:
    """Record in the open interruption how it was recovered."""
    assert context.current is not None
    index = find_open_membership_entry(status, context.current.generation)
    if index is None:
        return status
    entry = status.history[index]
    # A pod created because of a notice is no spare, although it existed before the rank was handed over.
    failed_at = min(entry.failed_at or context.now, context.job.status.leaving_since or context.now)
    if size < len(context.current.members):
        response = RecoveryResponse.SHRINK
    elif joined and all(worker.pod.created + _CREATION_ROUNDING <= failed_at for worker in joined):
        response = RecoveryResponse.SPARE
    else:
        response = RecoveryResponse.REPLACE
    return replace_entry(status, index, entry.replaced(response=response, pods_replaced=len(joined)))


def record_size_request(context: PlanContext, status: StatusT, desired: int) -> StatusT:
    """Record that the user changed the size; until it is reached, a change of size is attributed to the user."""
    if context.current is None or status.desired == 0 or status.desired - status.idle_nodes.taken == desired:
        return status
    message = f"from {len(context.current.members)} to {pluralize(desired, 'node')}"
    return set_condition(status, ConditionType.RESIZING, True, Reason.SIZE_REQUESTED, message, now=context.now)


def resize(context: PlanContext, status: TrainingJobStatus) -> Decision:
    """Form the next generation at another size, if the size does not fit and enough workers are ready."""
    assert context.current is not None
    present, desired = len(context.current.members), status.desired
    if any(worker is not None and worker.finished for _, worker in context.members):
        return Decision(status=status)
    if present == desired:
        return Decision(status=status)
    requested = is_true(status, ConditionType.RESIZING)
    newcomers = list_joiners(context) if requested else list_healthy_joiners(context)
    size, requeue_at = (desired, ()) if present > desired else _choose_growth(context, status, present, len(newcomers))
    if size == present:
        return Decision(status=status, requeue_at=requeue_at)
    survivors = select_survivors(context, context.current.members, size)
    joined = select_joiners(context, survivors, newcomers, size, desired - status.idle_nodes.taken)
    members = assign_ranks(survivors, joined, size, build_rank_placement(context))
    new = NewGeneration(members=members, transition=Transition.GRACEFUL, cause=Cause.RESIZE)
    return Decision(status=_record_resize(context, status, size), new=new, requeue_at=requeue_at)


def _choose_growth(
    context: PlanContext, status: TrainingJobStatus, present: int, newcomers: int
) -> tuple[int, tuple[float, ...]]:
    """Return the size to grow to now, or `present` if not yet; and when to check again (Unix seconds)."""
    if newcomers == 0 or not context.is_settled:
        return present, ()
    requested = is_true(status, ConditionType.RESIZING)
    resume_at = 0.0 if requested else growth.find_growth_resume_time(context, status)
    if context.now < resume_at:
        return present, (resume_at,)
    size = _choose_growth_target(
        context, status, present, min(status.desired, present + newcomers), requested=requested
    )
    compile_seconds = growth.estimate_compile_seconds(context, status, size)
    if size <= present or not (
        requested or growth.is_worth_growing(context, status, present, size, extra_seconds=compile_seconds)
    ):
        return present, ()
    worthwhile_at = (
        context.now if requested else growth.compute_worthwhile_time(context, status, size, _find_last_change(status))
    )
    if context.now < worthwhile_at:
        return present, (worthwhile_at,)
    if size == status.desired:
        return size, ()
    deadline = growth.find_rescale_time(context, status)
    return (present, (deadline,)) if context.now < deadline else (size, ())


def _choose_growth_target(
    context: PlanContext, status: PublicStatus, present: int, nodes: int, *, requested: bool
) -> int:
    """Return the size to grow to with this number of nodes; a compiled one if that is growth."""
    size = nodes if nodes == status.desired else context.size.find_legal_size(nodes)
    if requested or not growth.estimate_compile_seconds(context, status, size):
        return size
    compiled = growth.find_available_size(context, status, nodes)
    return compiled if compiled > present else size


def _find_last_change(status: PublicStatus) -> float:
    """Return when the current size was reached (Unix seconds), as far as the history reaches."""
    changes = (RecoveryResponse.SHRINK, RecoveryResponse.GROW, RecoveryResponse.RESIZE)
    times = [entry.decided_at for entry in status.history if entry.response in changes and entry.decided_at is not None]
    return max(times, default=0.0)


def _record_resize(context: PlanContext, status: TrainingJobStatus, size: int) -> TrainingJobStatus:
    """Record this change of size, unless the current generation is already being left."""
    assert context.current is not None
    present = len(context.current.members)
    if find_open_membership_entry(status, context.current.generation) is not None:
        return status
    if status.membership.generation != context.current.generation:
        return status
    requested = is_true(status, ConditionType.RESIZING)
    return open_interruption(
        context,
        status,
        cause=Cause.RESIZE if requested else Cause.CAPACITY,
        response=RecoveryResponse.RESIZE if requested or size < present else RecoveryResponse.GROW,
        message=f"from {present} to {pluralize(size, 'node')}{_describe_resize(context, status, size - present)}",
    )


def _describe_resize(context: PlanContext, status: PublicStatus, more: int) -> str:
    if context.grant is not None and status.desired < context.size.desired:
        return f": the queue grants {status.desired} of {context.size.desired}"
    taken = status.idle_nodes.taken
    if more > 0 and taken:
        return f": {pluralize(taken, 'idle node')} beyond the {status.desired - taken} requested"
    if more < 0 and context.observed.nodes_wanted_by_gangs:
        nodes = pluralize(-more, "idle node")
        return f": {nodes} released, because other jobs wait for {context.observed.nodes_wanted_by_gangs}"
    return ""


def replace_forgotten_generation(context: PlanContext, status: TrainingJobStatus) -> Decision:
    """Start the same members above a generation that an agent or a rank reports and the record does not know.

    The cluster's state was restored from a backup. Agents never join an older generation than they have been in, so
    those that know the newer one would wait for the others forever, and ranks of an older one cannot save.
    """
    assert context.current is not None
    recorded, newest = context.current.generation, find_newest_generation(context)
    if newest <= recorded:
        return Decision(status=status)
    if not _can_all_start_again(context):
        return Decision(status=status)
    if find_open_membership_entry(status, recorded) is None:
        message = (
            f"an agent or the checkpoints are of generation {newest}, and the record of the cluster ends with "
            f"generation {recorded}, as after a restore of etcd from a backup; all workers start again"
        )
        status = open_interruption(
            context, status, cause=Cause.POD_LOST, response=RecoveryResponse.REPLACE, message=message
        )
    new = NewGeneration(members=context.current.members, transition=Transition.IMMEDIATE, cause=Cause.POD_LOST)
    return Decision(status=status, new=new)


def finish_decided_generation(context: PlanContext, status: TrainingJobStatus) -> Decision:
    """Start the same members under the number in the status if that generation was not recorded."""
    current = context.current
    if current is None or status.membership.generation <= current.generation:
        return Decision(status=status)
    if not _can_all_start_again(context):
        return Decision(status=status)
    index = find_open_membership_entry(status, current.generation)
    cause = Cause.RESIZE if index is None else status.history[index].cause
    new = NewGeneration(members=current.members, transition=Transition.GRACEFUL, cause=cause)
    return Decision(status=status, new=new)


def _can_all_start_again(context: PlanContext) -> bool:
    return all(worker is not None and worker.warm and not worker.finished for _, worker in context.members)


def decide_generation(
    context: PlanContext, status: TrainingJobStatus, failed_members: tuple[FailedMember, ...]
) -> Decision:
    """Return the decision; `status` has the interruption that the failures opened."""
    decision = _decide(context, status, failed_members)
    since = _find_waiting_since(context, status, decision.new, failed_members)
    return replace(decision, status=decision.status.replaced(waiting_since=since))


def _find_waiting_since(
    context: PlanContext, status: TrainingJobStatus, new: NewGeneration | None, failed_members: tuple[FailedMember, ...]
) -> float | None:
    """Return since when the job waits for missing workers (Unix seconds); None while none is missing."""
    since = context.now if status.waiting_since is None else status.waiting_since
    if new is not None:
        return context.now if len(new.members) < status.desired else None
    if context.current is None:
        return since
    if failed_members or any(worker is not None and worker.finished for _, worker in context.members):
        return status.waiting_since
    return None if len(context.current.members) == status.desired else since


def _decide(context: PlanContext, status: TrainingJobStatus, failed_members: tuple[FailedMember, ...]) -> Decision:
    if context.current is None:
        return form_first_generation(context, status)
    if failed_members:
        wait_until = _find_wait_for_survivors(context, failed_members)
        if wait_until is not None:
            return Decision(status=status, requeue_at=(wait_until,))
        return replace_failed(context, status, failed_members)
    requeue_at: tuple[float, ...] = ()
    for policy in (restart_stopped, replace_forgotten_generation, resize, finish_decided_generation):
        decision = policy(context, status)
        status, requeue_at = decision.status, requeue_at + decision.requeue_at
        if decision.new is not None:
            break
    return Decision(status=status, new=decision.new, requeue_at=requeue_at)


def _find_wait_for_survivors(context: PlanContext, failed_members: tuple[FailedMember, ...]) -> float | None:
    """Return until when a new operator waits for the agent of a member that is left; None if it may decide.

    After a restore from a backup only such an agent knows the number that the next generation must exceed.
    """
    lost = {failed.member.pod_uid for failed in failed_members}
    remaining = [worker for member, worker in context.members if worker is not None and member.pod_uid not in lost]
    if not remaining or any(worker.agent is not None and worker.agent.heartbeat is not None for worker in remaining):
        return None
    wait_until = context.observed.coordinator_since + RECONNECT_SECONDS
    return wait_until if context.now < wait_until else None


def select_survivors(context: PlanContext, members: Sequence[Member], size: int) -> tuple[Member, ...]:
    """Return at most `size` of the members, dropping extras first, then the highest ranks."""
    extra = {uid for uid, worker in context.workers.items() if worker.pod.extra}
    # A unit keeps its ranks also while one of them is to be filled.
    units = dict.fromkeys(member.node_rank // context.unit_nodes for member in members)
    if context.unit_nodes > 1:
        kept_units = sorted(units)[: size // context.unit_nodes]
        return tuple(member for member in members if member.node_rank // context.unit_nodes in kept_units)
    kept = sorted(members, key=lambda member: (member.pod_uid in extra, member.node_rank))[:size]
    return tuple(sorted(kept, key=lambda member: member.node_rank))


def select_joiners(
    context: PlanContext, survivors: Sequence[Member], newcomers: tuple[Worker, ...], size: int, base: int
) -> tuple[Worker, ...]:
    """Return the joiners for the ranks up to `size`; ranks beyond `base` take extras, so that spares remain."""
    extra = [worker for worker in newcomers if worker.pod.extra]
    if size <= base or not extra:
        return newcomers
    survivor_uids = {member.pod_uid for member in survivors}
    surviving_extras = sum(worker.pod.extra for uid, worker in context.workers.items() if uid in survivor_uids)
    chosen_extras = extra[: max(0, size - base - surviving_extras)]
    others = [worker for worker in newcomers if worker not in chosen_extras]
    return (*chosen_extras, *others)[: max(0, size - len(survivors))]
