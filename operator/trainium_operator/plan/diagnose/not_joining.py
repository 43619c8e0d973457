"""Policy: a member that answers but does not join its generation; a finder for `losses`.

Its agent is heard, so silence says nothing, and no process of it runs that could report anything; the others would wait
for it for ever. Joining takes as long as the old processes may take to leave; beyond that and the limit of a start
(`recovery.hang.initSeconds`) the member counts as hung.
Invariants: only those that have joined accuse; time counts since the operator first heard that they wait in this
attempt, so an operator that starts anew waits the full limit again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.diagnose.loss import Loss

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker


def not_joined(facts: Facts, member: Member, worker: Worker, join_by: float | None) -> Loss | None:
    """The others have waited for it too long: it had to join by `join_by`, see `join_deadlines`."""
    if join_by is None or facts.now < join_by:
        return None
    seconds = facts.now - join_by + _limit(facts)
    return Loss(
        member=member,
        worker=worker,
        cause=Cause.HANG,
        failed_at=facts.now - seconds,
        message=(
            f"pod {worker.pod.name} on node {worker.pod.node} answers, but the others have waited {seconds:.0f} s "
            "for it to join them"
        ),
    )


def join_deadlines(facts: Facts) -> dict[int, float]:
    """When each member that others wait for will count as hung unless it joins: Unix seconds by rank."""
    if not facts.job.spec.recovery.hang.enabled:
        return {}
    limit = _limit(facts)
    deadlines: dict[int, float] = {}
    for other, beat in facts.beats:
        since = facts.observed.agents[other.pod_uid].joining_since
        if since is None or beat.phase is not WorkerPhase.JOINING:
            continue
        for rank in beat.waiting_for:
            if rank != other.node_rank:
                deadlines[rank] = min(since + limit, deadlines.get(rank, math.inf))
    return deadlines


def _limit(facts: Facts) -> float:
    recovery = facts.job.spec.recovery
    return recovery.hang.init_seconds + recovery.grace_period_seconds
