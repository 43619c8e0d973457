"""Find members whose nodes are deleted or bad, and hand the ranks on bad nodes over.

A member on a bad node hands its rank over while it still answers, as soon as another worker is warm. While the fleet is
frozen (`FleetView.frozen`) no problem of a node counts for more than a preference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.diagnose.failed_member import FailedMember
from trainium_operator.plan.diagnose.silence import Evidence, find_failure_time, find_last_step_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.faults.node_signals import NodeProblem
    from trainium_operator.plan.view.context import PlanContext
    from trainium_operator.plan.view.workers import Worker


def detect_deleted_node(context: PlanContext, member: Member, worker: Worker) -> FailedMember | None:
    """Return the failure of a member whose node is deleted or out of service; its pod is deleted by force."""
    if not worker.node_deleted:
        return None
    state = "no longer exists" if worker.node is None else "was declared out of service"
    message = f"node {worker.pod.node} of pod {worker.pod.name} {state}"
    failed_at = find_failure_time(context, worker)
    return FailedMember(
        member=member, worker=worker, cause=Cause.NODE_LOST, failed_at=failed_at, message=message, force_delete=True
    )


def detect_node_failure(
    context: PlanContext, evidence: Evidence, member: Member, worker: Worker
) -> FailedMember | None:
    """Return the failure of a member on a permanently broken node; it saves if it can; no replacement is awaited."""
    problem = context.node_problems.get(worker.pod.uid)
    if problem is None or problem.severity is not Severity.FATAL:
        return None
    return _build_bad_node_failure(context, member, worker, problem, can_save=_is_training(context, evidence, worker))


def find_handovers(context: PlanContext, evidence: Evidence, failed_members: list[FailedMember]) -> list[FailedMember]:
    """Add the members on bad nodes whose ranks free candidates can take over.

    A member on a broken node that is handed over this way keeps its pod until its rank is elsewhere.
    """
    by_uid = {failed.member.pod_uid: failed for failed in failed_members}
    fatal = [failed for failed in failed_members if _is_fatal(context, failed)]
    # A unit is replaced as a whole, and its ranks are neighbours.
    lost_units = {failed.member.node_rank // context.unit_nodes for failed in failed_members}
    free_units = len(context.candidates) // context.unit_nodes - len(lost_units)
    if free_units >= 0:
        failed_members = [
            replace(failed, keeps_pod=failed.can_save) if failed in fatal else failed for failed in failed_members
        ]
    for member, worker in find_members_to_move(context):
        unit = member.node_rank // context.unit_nodes
        if free_units <= 0 and unit not in lost_units:
            break
        if member.pod_uid not in by_uid and not worker.silent and not worker.node_bad:
            can_save = context.is_settled and _is_training(context, evidence, worker)
            problem = context.node_problems[worker.pod.uid]
            failed = _build_bad_node_failure(context, member, worker, problem, can_save=can_save)
            failed_members.append(replace(failed, keeps_pod=can_save))
            free_units -= unit not in lost_units
            lost_units.add(unit)
    return failed_members


def find_members_to_move(context: PlanContext) -> Iterator[tuple[Member, Worker]]:
    """Yield members that train on until a worker that replaces them is ready, by rank."""
    for member, worker in context.members:
        problem = context.node_problems.get(member.pod_uid)
        if worker is not None and problem is not None and problem.severity is Severity.DRAIN and worker.alive:
            yield member, worker


def _build_bad_node_failure(
    context: PlanContext, member: Member, worker: Worker, problem: NodeProblem, *, can_save: bool
) -> FailedMember:
    message = f"node {worker.pod.node} of pod {worker.pod.name} is bad: {problem}"
    if problem.message:
        message += f": {problem.message}"
    failed_at = problem.since if problem.severity is Severity.FATAL else None
    if failed_at is None or not worker.pod.created <= failed_at <= context.now:
        failed_at = context.now  # the ranks train on until now
    return FailedMember(
        member=member,
        worker=worker,
        cause=problem.cause,
        # While the fleet is frozen, ranks also train on after a fatal problem.
        failed_at=min(max(failed_at, find_last_step_time(context)), context.now),
        message=message,
        force_delete=worker.node_bad,
        can_save=can_save,
    )


def _is_fatal(context: PlanContext, failed: FailedMember) -> bool:
    problem = context.node_problems.get(failed.member.pod_uid)
    return failed.worker is not None and failed.can_save and problem is not None and problem.severity is Severity.FATAL


def _is_training(context: PlanContext, evidence: Evidence, worker: Worker) -> bool:
    """Return whether it answers and makes steps, so that it can save before it leaves."""
    heartbeat = worker.heartbeat
    if heartbeat is None or worker.silent or worker.node_bad or heartbeat.phase is not WorkerPhase.TRAINING:
        return False
    return not evidence.is_stalled(context.now)
