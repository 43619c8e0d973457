"""Policy: record restarts in place, which agents do by themselves, also while the operator is away.

An attempt is recorded once, when its culprit is known (`find_culprit`). Until then the other members' heartbeats may
still name it. If all have reported and none names one, no worker is blamed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import rank_severity
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.diagnose.process_failures import Culprit, find_culprit, find_restarts
from trainium_operator.plan.history.interruptions import HISTORY_LENGTH, open_interruption
from trainium_operator.plan.model.actions import PolicyResult
from trainium_operator.plan.model.observed import HEARTBEAT_SECONDS
from trainium_operator.plan.view.node_problems import is_clock_in_sync

if TYPE_CHECKING:
    from collections.abc import Collection

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.wire.messages import RestartRecord
    from trainium_operator.plan.view.context import PlanContext

_STARTING = (WorkerPhase.JOINING, WorkerPhase.LOADING)


def record_restarts(
    context: PlanContext, status: TrainingJobStatus, *, failed_uids: Collection[str] = ()
) -> PolicyResult:
    """Open an interruption for each attempt that is not recorded yet.

    While a member has failed, the others restart because of it: their restarts belong to that interruption unless
    another member caused them, or the failed one itself restarted with them before. failed_uids: the pods of failed
    members.
    """
    if context.current is None or status.membership.generation != context.current.generation:
        return PolicyResult(status=status)
    newest = max((heartbeat.attempt for _, heartbeat in context.heartbeats), default=0)
    for attempt in range(max(status.membership.attempt, newest - HISTORY_LENGTH), newest):
        all_reported = not failed_uids and _have_all_reported(context, newest)
        culprit = find_culprit(context, attempt, all_reported=all_reported)
        if culprit is None and not failed_uids and not all_reported:
            return PolicyResult(status=status, requeue_at=(context.now + HEARTBEAT_SECONDS,))
        if not failed_uids or (culprit is not None and not _is_failure(context, attempt, culprit, failed_uids)):
            status = _open_interruption(context, status, attempt, culprit)
        status = status.replaced(membership=status.membership.replaced(attempt=attempt + 1))
    return PolicyResult(status=status)


def _is_failure(context: PlanContext, attempt: int, culprit: Culprit, failed_uids: Collection[str]) -> bool:
    """Return whether the culprit is lost and did not start another attempt after this one."""
    uid = culprit.member.pod_uid
    return uid in failed_uids and all(
        heartbeat.attempt <= attempt for member, heartbeat in context.heartbeats if member.pod_uid == uid
    )


def _open_interruption(
    context: PlanContext, status: TrainingJobStatus, attempt: int, culprit: Culprit | None
) -> TrainingJobStatus:
    """Record that `attempt` was interrupted and the next one began."""
    record = _find_dated_record(context, attempt, culprit)
    cause, message = _describe_restart(context, attempt, culprit)
    return open_interruption(
        context,
        status,
        cause=cause,
        response=RecoveryResponse.IN_PLACE,
        message=message,
        failed_at=record.failed_at if record else None,
        attempt=attempt,
        member=culprit.member if culprit else None,
        suspected_node=culprit.member.node_name if culprit and _has_stalled(culprit) else "",
        restart=record,
    )


def _find_dated_record(context: PlanContext, attempt: int, culprit: Culprit | None) -> RestartRecord | None:
    """Return the record that dates the failure: the culprit's, else another member's; none with a wrong clock."""
    uids_in_sync = {member.pod_uid for member, heartbeat in context.heartbeats if is_clock_in_sync(heartbeat)}
    if culprit is not None and (culprit.record is None or culprit.member.pod_uid in uids_in_sync):
        return culprit.record
    return next(
        (record for member, record in find_restarts(context, attempt + 1) if member.pod_uid in uids_in_sync), None
    )


def _has_stalled(culprit: Culprit) -> bool:
    """Return whether its agent reports the stall; a lag behind the others is too little evidence to avoid its node."""
    return culprit.failure is not None and culprit.failure.exit_code == ExitCode.HUNG


def _describe_restart(context: PlanContext, attempt: int, culprit: Culprit | None) -> tuple[Cause, str]:
    if culprit is None:
        causes = {record.cause for _, record in find_restarts(context, attempt + 1)}
        victims = sum(
            any(
                (failure.generation, failure.attempt) == (heartbeat.generation, attempt)
                for failure in heartbeat.failures
            )
            for _, heartbeat in context.heartbeats
        )
        prefix = _describe_victims(victims, len(context.members))
        return (
            min(causes, key=rank_severity, default=Cause.PEER_LOST),
            f"the processes restarted in place; {prefix}none reported a failure, so no worker is blamed",
        )
    who = f"rank {culprit.failure.rank} in" if culprit.failure else "a process of"
    return culprit.cause, f"{who} pod {culprit.member.pod_name}, restarted in place: {culprit.why}"


def _describe_victims(victims: int, members: int) -> str:
    if not victims:
        return ""
    if members == 1:
        return "they lost each other and "
    return f"{victims} worker{'s' if victims > 1 else ''} lost a peer and "


def _have_all_reported(context: PlanContext, attempt: int) -> bool:
    """Return whether every member has reported since this attempt.

    A member that is silent or missing may be what the others lost. It counts only once they train without it.
    """
    heartbeats = {member.pod_uid: heartbeat for member, heartbeat in context.heartbeats if heartbeat.attempt >= attempt}
    unseen = [worker is None or worker.silent for member, worker in context.members if member.pod_uid not in heartbeats]
    has_resumed = all(heartbeat.phase not in _STARTING for heartbeat in heartbeats.values())
    return not unseen or (all(unseen) and has_resumed)
