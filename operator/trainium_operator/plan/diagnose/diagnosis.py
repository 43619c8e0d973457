"""Diagnose the generation in force: which members failed, why and since when, and which leave before their nodes do.

Members on nodes that are about to leave train on until another worker can replace them, the wait for capacity is over,
or the notice nearly is.

Guarantees:
- A failure is derived from what is there, so it survives a restart of the operator.
- A worker that restarts its processes in place has not failed; no node is blamed for a user's error.
- While a member has failed or the generation does not train, no notice is acted on before its last moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import rank_severity
from trainium_contract.status.conditions import Phase
from trainium_operator.plan.diagnose.departures import (
    EXIT_MARGIN_SECONDS,
    NOTICE_SECONDS,
    build_departure,
    build_notice_event,
    can_continue_without,
    find_leaving_members,
)
from trainium_operator.plan.diagnose.failed_member import FailedMember
from trainium_operator.plan.diagnose.join_timeouts import detect_join_timeout, find_join_deadlines
from trainium_operator.plan.diagnose.node_failures import detect_deleted_node, detect_node_failure, find_handovers
from trainium_operator.plan.diagnose.pod_failures import detect_ended_pod, detect_leaving_pod
from trainium_operator.plan.diagnose.process_failures import detect_process_failure, find_culprits
from trainium_operator.plan.diagnose.silence import (
    Evidence,
    collect_evidence,
    detect_silent_agent,
    find_failure_time,
    find_next_silence_check,
    is_suspect,
)
from trainium_operator.plan.diagnose.stragglers import find_straggler_handover
from trainium_operator.plan.model.observed import NodeReadiness

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.model.actions import Event
    from trainium_operator.plan.view.context import PlanContext
    from trainium_operator.plan.view.workers import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Problems of the members of the generation in force."""

    failed_members: tuple[FailedMember, ...]
    """Members that cannot continue or leave now, the most severe cause first."""
    requeue_at: tuple[float, ...]
    """When to diagnose again (Unix seconds)."""
    leaving_since: float | None = None
    """Since when there is a notice that a member's node will leave (Unix seconds); None for none."""
    events: tuple[Event, ...] = ()


def diagnose(context: PlanContext) -> Diagnosis:
    """Return the failed members, those that leave now, and when the others must leave."""
    failed_members, requeue_at = find_failed_members(context)
    failed_uids = {failed.member.pod_uid for failed in failed_members}
    leaving = [pair for pair in find_leaving_members(context) if pair[0].pod_uid not in failed_uids]
    if not leaving:
        return Diagnosis(failed_members=failed_members, requeue_at=requeue_at)
    known_since = context.job.status.leaving_since
    since = context.now if known_since is None else known_since
    taint_keys = [taint.key for _, worker in leaving if worker.node is not None for taint in worker.node.taints]
    notice_seconds = min((NOTICE_SECONDS.get(key, math.inf) for key in taint_keys), default=math.inf)
    depart_by = since + max(0.0, notice_seconds - context.job.spec.recovery.grace_period_seconds - EXIT_MARGIN_SECONDS)
    # A job with more workers than it requested gives the node up at once.
    has_surplus = (
        len(context.members) - len(leaving) >= context.job.status.desired - context.job.status.idle_nodes.taken
    )
    shrink_at = min(since + (0.0 if has_surplus else context.job.spec.recovery.rescale_after_seconds), depart_by)
    departures: tuple[FailedMember, ...] = ()
    if any(worker is not None and worker.finished for _, worker in context.members):
        pass  # the run ends; no rank is handed over any more
    elif (
        not failed_members
        and context.is_settled
        and context.now >= shrink_at
        and can_continue_without(context, len(leaving))
    ):
        departures = tuple(build_departure(context, *pair, keeps_pod=True) for pair in leaving)
    elif context.now >= depart_by:
        departures = tuple(build_departure(context, *pair, keeps_pod=False) for pair in leaving)
    return Diagnosis(
        failed_members=failed_members + departures,
        requeue_at=(*requeue_at, *(at for at in (shrink_at, depart_by) if context.now < at < math.inf)),
        leaving_since=since,
        events=(build_notice_event(context, leaving),) if known_since is None else (),
    )


def find_failed_members(context: PlanContext) -> tuple[tuple[FailedMember, ...], tuple[float, ...]]:
    """Return the failed members, most severe cause first, and when to requeue for suspects (Unix seconds)."""
    failed_members: list[FailedMember] = []
    requeue_at: list[float] = []
    evidence = collect_evidence(context)
    join_deadlines = find_join_deadlines(context)
    # It is not recovering, so only a new report can change the diagnosis.
    status = context.job.status
    is_steady = status.phase is Phase.RUNNING and not status.list_open_interruptions()
    if is_steady:
        requeue_at.append(context.now + context.status_interval)
    for member, worker in context.members:
        join_by = join_deadlines.get(member.node_rank)
        failed = _detect_failure(context, evidence, member, worker, join_by)
        if failed is not None:
            failed_members.append(failed)
        elif worker is not None and not worker.finished:
            if not is_steady or is_suspect(worker):
                requeue_at.append(find_next_silence_check(context, evidence, worker))
            if join_by is not None:
                requeue_at.append(join_by)
    failed_members = find_handovers(
        context, evidence, failed_members or find_culprits(context)
    ) or find_straggler_handover(context)
    if failed_members and len(failed_members) < len(context.members):
        failed_members += _list_finished_peers(context, {failed.member.pod_uid for failed in failed_members})
    return tuple(
        sorted(failed_members, key=lambda failed: (rank_severity(failed.cause), failed.member.node_rank))
    ), tuple(requeue_at)


def _detect_failure(
    context: PlanContext, evidence: Evidence, member: Member, worker: Worker | None, join_by: float | None
) -> FailedMember | None:
    if worker is None:
        agent = context.observed.agents.get(member.pod_uid)
        since = agent.last_seen if agent is not None else find_failure_time(context, None)
        is_stray = any(stray.uid == member.pod_uid for stray in context.observed.strays)
        state = "lost the labels of a worker" if is_stray else "no longer exists as a worker"
        message = f"pod {member.pod_name} on node {member.node_name} {state}"
        node = context.observed.nodes.get(member.node_name)
        if node is None or node.ready is NodeReadiness.TRUE:
            return FailedMember(member=member, worker=None, cause=Cause.POD_LOST, failed_at=since, message=message)
        message += ", and its node does not report"
        return FailedMember(member=member, worker=None, cause=Cause.NODE_LOST, failed_at=since, message=message)
    if worker.finished:
        return None
    return (
        detect_ended_pod(context, member, worker)
        or detect_deleted_node(context, member, worker)
        or detect_process_failure(context, member, worker)
        or detect_leaving_pod(context, member, worker)
        or detect_node_failure(context, evidence, member, worker)
        or detect_silent_agent(context, evidence, member, worker)
        or detect_join_timeout(context, member, worker, join_by)
    )


def _list_finished_peers(context: PlanContext, lost: set[str]) -> list[FailedMember]:
    """Return the workers that finished before a peer was lost.

    Their processes have ended, so the next generation replaces them.
    """
    return [
        FailedMember(
            member=member,
            worker=worker,
            cause=Cause.FINISHED,
            failed_at=context.now,
            message=f"pod {member.pod_name} had finished already",
        )
        for member, worker in context.members
        if worker is not None and worker.finished and member.pod_uid not in lost
    ]
