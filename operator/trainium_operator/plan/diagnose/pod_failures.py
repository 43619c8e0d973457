"""Find members whose pods have ended, or are being deleted or evicted.

No node is blamed for an error of the user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.responses import Response
from trainium_operator.plan.diagnose.loss import Loss
from trainium_operator.plan.diagnose.process_failures import give_up_failure
from trainium_operator.plan.diagnose.silence import failed_since
from trainium_operator.plan.faults.exits import cause_of_leaving, classify_pod_failure
from trainium_operator.plan.model.observed import PodPhase

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker


def detect_ended_pod(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    """Return a member whose pod has ended, with the cause that its reason, exit code and message have.

    A pod that ended while it was being deleted has the cause of the deletion, unless a device failed.
    """
    pod = worker.pod
    if pod.phase not in (PodPhase.FAILED, PodPhase.SUCCEEDED):
        return None
    given_up = give_up_failure(facts, worker)
    verdict = given_up[1] if given_up else classify_pod_failure(pod, facts.job.spec.recovery.rules)
    was_deleted = pod.deleting and given_up is None and verdict.cause is not Cause.DEVICE
    blames_node = verdict.response is Response.REPLACE_NODE if given_up is None and not was_deleted else None
    code = "" if pod.exit_code is None else f"exit code {pod.exit_code}"
    description = ", ".join(part for part in (pod.reason, code, pod.message) if part)
    return Loss(
        member=member,
        worker=worker,
        cause=cause_of_leaving(pod) if was_deleted else verdict.cause,
        blames_node=blames_node,
        failed_at=pod.finished or facts.now,
        message=f"pod {pod.name} on node {pod.node} ended ({description or 'no reason given'})",
        force_delete=worker.node_bad,
    )


def detect_leaving_pod(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    """Return a member whose pod is being deleted or evicted; it saves if its agent still answers."""
    if not worker.pod.deleting and not worker.pod.disrupted:
        return None
    cause, problem = cause_of_leaving(worker.pod), facts.node_problems.get(worker.pod.uid)
    seen = f": {problem}" if problem is not None and problem.cause is cause else ""
    return Loss(
        member=member,
        worker=worker,
        cause=cause,
        failed_at=facts.now if worker.answers else failed_since(facts, worker),
        message=f"pod {worker.pod.name} on node {worker.pod.node} is being deleted or evicted{seen}",
        force_delete=worker.node_bad,
        can_save=worker.answers,
    )
