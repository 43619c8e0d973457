"""Find members that answer but do not join their generation: they count as hung after the limit of a start.

Only members that have joined accuse one that has not, by the time since the operator first saw them wait.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.diagnose.failed_member import FailedMember

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.view.context import PlanContext
    from trainium_operator.plan.view.workers import Worker


def detect_join_timeout(
    context: PlanContext, member: Member, worker: Worker, join_by: float | None
) -> FailedMember | None:
    """Return the failure of a member that has not joined by `join_by` (Unix seconds), see `find_join_deadlines`.

    It failed when the others began to wait for it, by the operator's clock; the message states for how long they have
    waited.
    """
    if join_by is None or context.now < join_by:
        return None
    seconds = context.now - join_by + _join_limit_seconds(context)
    return FailedMember(
        member=member,
        worker=worker,
        cause=Cause.HANG,
        failed_at=context.now - seconds,
        message=(
            f"pod {worker.pod.name} on node {worker.pod.node} answers, but the others have waited {seconds:.0f} s "
            "for it to join them"
        ),
    )


def find_join_deadlines(context: PlanContext) -> dict[int, float]:
    """Return when each member that others wait for will count as hung unless it joins: Unix seconds by rank."""
    if not context.job.spec.recovery.hang.enabled:
        return {}
    limit = _join_limit_seconds(context)
    deadlines: dict[int, float] = {}
    for other, heartbeat in context.heartbeats:
        since = context.observed.agents[other.pod_uid].joining_since
        if since is None or heartbeat.phase is not WorkerPhase.JOINING:
            continue
        for rank in heartbeat.waiting_for:
            if rank != other.node_rank:
                deadlines[rank] = min(since + limit, deadlines.get(rank, math.inf))
    return deadlines


def _join_limit_seconds(context: PlanContext) -> float:
    """Return the limit of a start: the time for initialization, and the grace period of the processes before it."""
    recovery = context.job.spec.recovery
    return recovery.hang.init_seconds + recovery.grace_period_seconds
