"""Policy: start all workers or none.

Until the first step of a run no worker should hold a node while others are missing. Where the cluster serves a gang
API, the pods that a job starts with are one group of it. Newcomers of a running job are not in a group: the members
hold their nodes already, and the group's minimum could block a single newcomer forever. With a queue this starts only
after Kueue has admitted the job.

In any case a time-out applies: workers that hold nodes, but too few for any legal size, release them after
`gangTimeoutSeconds`. New ones are created after a pause that grows and differs from job to job, so that two jobs with
half of the nodes each do not collide again. An elastic job whose workers suffice for a smaller size never releases
them: it starts at that size after `rescaleAfterSeconds` (`form_first_generation`), so the two limits never compete.
Spares do not count.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.conditions import ConditionType
from trainium_operator.backoff import compute_backoff
from trainium_operator.plan.model.actions import PolicyResult, build_event
from trainium_operator.plan.model.conditions import set_condition
from trainium_operator.plan.model.grant import AdmissionState
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.pods.refused_pods import describe_start_failures
from trainium_operator.plan.view.context import PlanContext, describe_creation_refusal, find_creation_blocker
from trainium_operator.plan.view.size import count_needed_workers
from trainium_operator.plan.view.workers import Worker, build_deletion

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import GangStatus

_FIRST_PAUSE_SECONDS = 30.0
_MAX_PAUSE_SECONDS = 600.0


def withhold_pods(context: PlanContext, status: TrainingJobStatus) -> tuple[bool, PolicyResult]:
    """Return whether no pod may be created now; release nodes that a partial gang has held for too long."""
    gang = status.gang
    if context.grant is not None and context.grant.state is not AdmissionState.ADMITTED:
        return True, PolicyResult(status=status)
    if status.membership.size > 0:
        gang = gang.replaced(holding_since=None, releases=0, retry_at=None)
        return False, PolicyResult(status=status.replaced(gang=gang))
    if gang.retry_at is not None and context.now < gang.retry_at:
        return True, _release_workers(context, status, gang.retry_at)
    if (
        not 0 < len(_list_scheduled_workers(context)) < count_needed_workers(context.size)
    ):  # no node is held, or enough for a start
        return False, PolicyResult(status=status.replaced(gang=gang.replaced(holding_since=None)))
    since = context.now if gang.holding_since is None else gang.holding_since
    deadline = since + context.job.spec.scheduling.gang_timeout_seconds
    if context.now < deadline:
        return False, PolicyResult(
            status=status.replaced(gang=gang.replaced(holding_since=since)), requeue_at=(deadline,)
        )
    releases = gang.releases + 1
    retry_at = context.now + pause_seconds(context.job.uid, releases)
    gang = gang.replaced(holding_since=None, releases=releases, retry_at=retry_at)
    released = _release_workers(context, status.replaced(gang=gang), retry_at)
    return True, replace(
        released, events=(build_event(Reason.GANG_TIMED_OUT, _describe_timeout(context, gang), warning=True),)
    )


def pause_seconds(uid: str, times: int) -> float:
    """Return how long a job waits after it released its nodes for the n-th time.

    Jitter by its uid, so the pause is the same each time.
    """
    spread = int(hashlib.sha256(f"{uid}/{times}".encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
    return compute_backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS, times) * (0.5 + spread)


def set_admitted(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """Report whether the workers have their nodes, and who decides it. Never how many, which changes with each pod."""
    admitted, reason, message = _decide_admission(context, status)
    return set_condition(status, ConditionType.ADMITTED, admitted, reason, message, now=context.now)


def _decide_admission(context: PlanContext, status: TrainingJobStatus) -> tuple[bool, Reason, str]:
    gang, grant = status.gang, context.grant
    if grant is not None and not context.job.spec.suspend and grant.releases_workers:
        reason = grant.reason or Reason.WAITING_FOR_QUEUE
        suffix = f"; {len(context.workers)} workers save and leave" if context.workers else ""
        return False, reason, f"{grant.message}{suffix}"
    bound = len(_list_scheduled_workers(context))
    if status.membership.size > 0 or (not context.job.spec.suspend and 0 < status.desired <= bound):
        return True, Reason.ADMITTED, "the workers have their nodes"
    if context.job.spec.suspend:
        return False, Reason.SUSPENDED, ""
    if (blocker := describe_creation_refusal(context) or find_creation_blocker(context)) is not None:
        return False, *blocker
    if gang.retry_at is not None and context.now < gang.retry_at:
        return False, Reason.GANG_TIMED_OUT, _describe_timeout(context, gang)
    if grant is not None and grant.state is AdmissionState.UNKNOWN:
        return False, grant.reason or Reason.WAITING_FOR_QUEUE, grant.message
    start_failures = describe_start_failures(status, context.now)
    if start_failures is not None and not bound:  # no node is missing
        return False, Reason.WORKER_NOT_STARTING, start_failures
    wait_description = "".join(feature.describe_wait(context) for feature in context.features)
    limit = context.job.spec.scheduling.gang_timeout_seconds
    message = (
        f"not all workers have a node{wait_description}; if too few have one after {limit} s, the job releases these "
        "nodes"
    )
    return False, Reason.WAITING_FOR_GANG, message


def _describe_timeout(context: PlanContext, gang: GangStatus) -> str:
    limit = context.job.spec.scheduling.gang_timeout_seconds
    return (
        f"Too few workers for any size that the job may begin at held nodes for {limit} s; the job released them "
        f"({gang.releases} times since it last trained). The next attempt begins at "
        f"{format_rfc3339(gang.retry_at or 0.0)}. Free or add nodes, lower "
        "spec.workers.minReplicas, or raise spec.scheduling.gangTimeoutSeconds."
    )


def _list_scheduled_workers(context: PlanContext) -> list[Worker]:
    return [worker for worker in context.workers.values() if worker.alive and worker.pod.node]


def _release_workers(context: PlanContext, status: TrainingJobStatus, retry_at: float) -> PolicyResult:
    """Delete every worker that holds a node or could; the wait for missing ones restarts with the next attempt."""
    workers = (worker for worker in context.workers.values() if worker.holds_node)
    deletions = tuple(action for worker in workers for action in build_deletion(worker, force=worker.node_bad))
    return PolicyResult(status=status.replaced(waiting_since=None), actions=deletions, requeue_at=(retry_at,))
