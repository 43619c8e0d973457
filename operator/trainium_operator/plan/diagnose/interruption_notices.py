"""Policy: members on nodes that are about to leave go in time: saved, and without a failure that counts.

Which signals say so stands in `node_signals` (taints, deletion; cause Preempted), and `node_health` hands the rank over
as soon as a warm worker is free. This policy is about the time that is left. While nobody can take the rank the member
trains on; an elastic job shrinks when the wait for capacity is over, or the notice nearly is; at the last moment of a
notice whose end is known the ranks save and leave in any case. Where no end is known, the eviction is the last call.

Invariants: while a member is lost or the generation does not train, nothing is done before the last call; the pod of a
rank that was given up is deleted only when the next generation trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_operator.plan.diagnose.loss import Loss
from trainium_operator.plan.diagnose.node_health import members_to_move
from trainium_operator.plan.model.actions import event
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.sentences import listed
from trainium_operator.plan.view.facts import newcomers_of
from trainium_operator.plan.view.progress import is_settled

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.model.actions import EventIntent
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker

_KNOWN_SECONDS = {"aws-node-termination-handler/spot-itn": 120.0}
"""Taint -> time between the notice and the end of the node; others end when the last pod has been evicted."""
_EXIT_MARGIN_SECONDS = 10.0
"""Between the end of the ranks' grace and the end of the node."""
_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """What the notices in force ask for."""

    departures: tuple[Loss, ...] = ()
    """Members that give up their ranks now although nobody takes them."""
    since: float | None = None
    """Since when the oldest one stands (Unix seconds); None when nobody is about to leave."""
    looks: tuple[float, ...] = ()
    """When to look again (Unix seconds)."""
    notes: tuple[EventIntent, ...] = ()


def heed_notices(facts: Facts, losses: tuple[Loss, ...]) -> Notices:
    """Which members, besides the lost ones, leave now, and when the others must."""
    lost = {loss.member.pod_uid for loss in losses}
    leaving = [each for each in _leaving(facts) if each[0].pod_uid not in lost]
    if not leaving:
        return Notices()
    known = facts.job.status.leaving_since
    since = facts.now if known is None else known
    last_call = _last_call(facts, leaving, since)
    # Who has more than was asked for gives the node up at once.
    beyond = len(facts.members) - len(leaving) >= facts.job.status.desired - facts.job.status.idle_nodes.taken
    shrink_at = min(since + (0.0 if beyond else facts.job.spec.recovery.rescale_after_seconds), last_call)
    departures: tuple[Loss, ...] = ()
    if any(worker is not None and worker.finished for _, worker in facts.members):
        pass  # the run ends; nobody takes a rank any more
    elif not losses and is_settled(facts) and facts.now >= shrink_at and _is_enough(facts, len(leaving)):
        departures = tuple(_departure(facts, each, stays=True) for each in leaving)
    elif facts.now >= last_call:
        departures = tuple(_departure(facts, each, stays=False) for each in leaving)
    return Notices(
        departures=departures,
        since=since,
        looks=tuple(at for at in (shrink_at, last_call) if facts.now < at < _NEVER),
        notes=(_told(facts, leaving),) if known is None else (),
    )


def _leaving(facts: Facts) -> list[tuple[Member, Worker]]:
    """Members whose nodes are not bad, but on their way out."""
    moving = members_to_move(facts)
    return [
        each for each in moving if facts.troubles[each[0].pod_uid].cause is Cause.PREEMPTED and not each[1].finished
    ]


def _told(facts: Facts, leaving: list[tuple[Member, Worker]]) -> EventIntent:
    """Told once, when the first notice comes."""
    member = leaving[0][0]
    names = listed(tuple(each.pod_name for each, _ in leaving))
    return event(
        Reason.INTERRUPTION_NOTICE,
        f"Node {member.node_name} is about to leave: {facts.troubles[member.pod_uid]}; {names} trains on until another "
        "worker can take the rank.",
        warning=True,
        node=member.node_name,
    )


def _last_call(facts: Facts, leaving: list[tuple[Member, Worker]], since: float) -> float:
    """When the ranks must begin to save and leave."""
    taints = [taint.key for _, worker in leaving if worker.node is not None for taint in worker.node.taints]
    soonest = min((_KNOWN_SECONDS.get(key, _NEVER) for key in taints), default=_NEVER)
    return since + max(0.0, soonest - facts.job.spec.recovery.grace_period_seconds - _EXIT_MARGIN_SECONDS)


def _is_enough(facts: Facts, leaving: int) -> bool:
    """Whether those who stay, and the newcomers, are enough for a legal size."""
    return facts.size.legal_at_most(len(facts.members) - leaving + len(newcomers_of(facts))) > 0


def _departure(facts: Facts, each: tuple[Member, Worker], *, stays: bool) -> Loss:
    member, worker = each
    return Loss(
        member=member,
        worker=worker,
        cause=Cause.PREEMPTED,
        failed_at=facts.now,
        message=f"node {worker.pod.node} of pod {worker.pod.name} is about to leave: {facts.troubles[member.pod_uid]}",
        saves=not worker.silent and not worker.node_bad and worker.agent is not None,
        stays=stays,
    )
