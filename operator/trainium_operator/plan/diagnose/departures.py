"""Describe members whose nodes are about to leave, after an interruption notice.

`diagnosis` decides when they leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_operator.plan.diagnose.failed_member import FailedMember
from trainium_operator.plan.diagnose.node_failures import find_members_to_move
from trainium_operator.plan.model.actions import Event, build_event
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import format_names
from trainium_operator.plan.view.context import PlanContext, list_joiners

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.view.workers import Worker


NOTICE_SECONDS = {"aws-node-termination-handler/spot-itn": 120.0}
"""Taint -> seconds between the notice and the end of the node; with other taints it ends after its last pod was
evicted."""
EXIT_MARGIN_SECONDS = 10.0
"""Margin between the end of the ranks' grace and the end of the node."""


def find_leaving_members(context: PlanContext) -> list[tuple[Member, Worker]]:
    """Return members whose nodes are not bad, but about to leave."""
    return [
        (member, worker)
        for member, worker in find_members_to_move(context)
        if context.node_problems[member.pod_uid].cause is Cause.PREEMPTED and not worker.finished
    ]


def build_notice_event(context: PlanContext, leaving: list[tuple[Member, Worker]]) -> Event:
    """Return the event of a first interruption notice; it names the node of the first member that leaves."""
    member = leaving[0][0]
    names = format_names(tuple(member_leaving.pod_name for member_leaving, _ in leaving))
    return build_event(
        Reason.INTERRUPTION_NOTICE,
        f"Node {member.node_name} is about to leave: {context.node_problems[member.pod_uid]}; {names} trains on until "
        "another worker can take the rank.",
        warning=True,
        node=member.node_name,
    )


def can_continue_without(context: PlanContext, leaving: int) -> bool:
    """Return whether the remaining members and the joiners are enough for a legal size."""
    return context.size.find_legal_size(len(context.members) - leaving + len(list_joiners(context))) > 0


def build_departure(context: PlanContext, member: Member, worker: Worker, *, keeps_pod: bool) -> FailedMember:
    """Return the failure of a member that leaves now, before its node does."""
    problem = context.node_problems[member.pod_uid]
    return FailedMember(
        member=member,
        worker=worker,
        cause=Cause.PREEMPTED,
        failed_at=context.now,
        message=f"node {worker.pod.node} of pod {worker.pod.name} is about to leave: {problem}",
        can_save=worker.is_responsive,
        keeps_pod=keeps_pod,
    )
