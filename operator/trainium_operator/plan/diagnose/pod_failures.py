"""Find members whose pods have ended, or are being deleted or evicted.

No node is blamed for an error of the user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults import classify
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.responses import Response
from trainium_contract.faults.signs import SignKind
from trainium_operator.plan.diagnose.failed_member import FailedMember
from trainium_operator.plan.diagnose.process_failures import find_give_up_failure
from trainium_operator.plan.diagnose.silence import find_failure_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.faults.classify import Classification
    from trainium_contract.faults.rules import RecoveryRule
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.model.observed import PodView
    from trainium_operator.plan.view.context import PlanContext
    from trainium_operator.plan.view.workers import Worker


def detect_ended_pod(context: PlanContext, member: Member, worker: Worker) -> FailedMember | None:
    """Return the failure of a member whose pod has ended, with the cause that its reason, exit code and message have.

    A pod that ended while it was being deleted has the cause of the deletion, unless a device failed.
    """
    pod = worker.pod
    if not worker.ended:
        return None
    given_up = find_give_up_failure(context, worker)
    verdict = given_up[1] if given_up else classify_ended_pod(pod, context.job.spec.recovery.rules)
    was_deleted = pod.deleting and given_up is None and verdict.cause is not Cause.DEVICE
    blames_node = verdict.response is Response.REPLACE_NODE if given_up is None and not was_deleted else None
    exit_code = "" if pod.exit_code is None else f"exit code {pod.exit_code}"
    description = ", ".join(part for part in (pod.reason, exit_code, pod.message) if part)
    return FailedMember(
        member=member,
        worker=worker,
        cause=_find_cause_of_leaving(worker) if was_deleted else verdict.cause,
        blames_node=blames_node,
        failed_at=pod.finished or context.now,
        message=f"pod {pod.name} on node {pod.node} ended ({description or 'no reason given'})",
        force_delete=worker.node_bad,
    )


def detect_leaving_pod(context: PlanContext, member: Member, worker: Worker) -> FailedMember | None:
    """Return the failure of a member whose pod is being deleted or evicted; it saves if its agent still answers."""
    if not worker.pod.deleting and not worker.pod.disrupted:
        return None
    cause, problem = _find_cause_of_leaving(worker), context.node_problems.get(worker.pod.uid)
    seen = f": {problem}" if problem is not None and problem.cause is cause else ""
    if cause is Cause.NODE_LOST:
        seen = f", because its node does not report{seen}"
    elif find_eviction_cause(worker.pod) is not None:
        seen = f": {worker.pod.message}"
    return FailedMember(
        member=member,
        worker=worker,
        cause=cause,
        failed_at=context.now if worker.is_responsive else find_failure_time(context, worker),
        message=f"pod {worker.pod.name} on node {worker.pod.node} is being deleted or evicted{seen}",
        force_delete=worker.node_bad,
        can_save=worker.is_responsive,
    )


def classify_ended_pod(pod: PodView, rules: Sequence[RecoveryRule]) -> Classification:
    """Classify a pod in phase Failed."""
    return classify.classify_pod_failure(
        reason=pod.reason,
        code=pod.exit_code,
        disrupted=pod.disrupted,
        disruption=pod.disruption,
        message=pod.message,
        rules=rules,
    )


def _find_cause_of_leaving(worker: Worker) -> Cause:
    """Return why a worker leaves: its node, if neither the node nor the agent reports and no container has ended."""
    if worker.node_bad and not worker.is_responsive and worker.pod.exit_code is None:
        return Cause.NODE_LOST
    return find_leaving_cause(worker.pod)


def find_leaving_cause(pod: PodView) -> Cause:
    """Return why a pod that was asked to leave must leave."""
    if (cause := find_eviction_cause(pod)) is not None:
        return cause
    return classify.classify_disruption(pod.disruption) if pod.disrupted else Cause.PREEMPTED


def find_eviction_cause(pod: PodView) -> Cause | None:
    """Return whose limit a kubelet evicted the pod for; None without such a message."""
    eviction = classify.find_eviction(pod.reason, pod.message)
    return None if eviction is None else eviction.cause


def has_failed_by_itself(pod: PodView) -> bool:
    """Return whether a Failed pod ended by its own program, not by its node, the scheduler, an eviction or a signal."""
    by_reason = classify.find_cause(SignKind.POD_REASON, pod.reason)
    if pod.disrupted or pod.exit_code is None or by_reason not in (None, Cause.OUT_OF_MEMORY, Cause.USER_ERROR):
        return False
    by_signal = pod.exit_code > 128 and pod.reason != "OOMKilled"
    return not by_signal and classify.classify_exit_code(pod.exit_code).cause not in (Cause.YIELDED, Cause.FINISHED)
