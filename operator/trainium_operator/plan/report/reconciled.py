"""Report what the cluster holds other than requested, and what nobody else would name.

Guarantee: the condition Reconciled exists only from the first difference on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import PolicyResult, build_event
from trainium_operator.plan.model.conditions import find_condition, is_true, set_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.context import describe_creation_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model.observed import PodView, StrayPod
    from trainium_operator.plan.view.context import PlanContext

_CONDITION = ConditionType.RECONCILED
_MAX_SHOWN = 3
DELETION_SECONDS = 60.0
"""A pod that still exists for longer after its grace period is named."""


def report_differences(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Set the condition, and add an event when its reason is new."""
    differences = tuple(_list_differences(context, status))
    ends = (
        pod.deletion_deadline + DELETION_SECONDS for pod in context.observed.pods if pod.deletion_deadline is not None
    )
    requeue_at = tuple(at for at in ends if at > context.now)
    old = find_condition(context.job.status, _CONDITION)
    if not differences:
        if old is not None:
            status = set_condition(status, _CONDITION, True, Reason.RECONCILED, "", now=context.now)
        return PolicyResult(status=status, requeue_at=requeue_at)
    more = f"; and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
    reason, text = differences[0][0], "; ".join(sentence for _, sentence in differences[:_MAX_SHOWN]) + more
    status = set_condition(status, _CONDITION, False, reason, text, now=context.now)
    is_new = old is None or old.reason != reason
    events = (build_event(reason, text, warning=True),) if is_new else ()
    return PolicyResult(status=status, events=events, requeue_at=requeue_at)


def _list_differences(context: PlanContext, status: TrainingJobStatus) -> Iterator[tuple[Reason, str]]:
    """Yield each difference with its reason, as a sentence without a full stop."""
    if is_true(status, ConditionType.PODS_READY):  # otherwise that condition has it
        creation_refusal = describe_creation_refusal(context)
        yield from () if creation_refusal is None else (creation_refusal,)
    for stray in context.observed.strays:
        yield Reason.STRAY_PODS, _describe_stray(stray, context.job.namespace)
    for pod in context.observed.pods:
        if pod.deletion_deadline is not None and context.now >= pod.deletion_deadline + DELETION_SECONDS:
            yield Reason.DELETION_PENDING, _describe_pending_deletion(pod)
    pods = {pod.name for pod in context.observed.pods}
    own_condition = f"NetworkPolicy/{names.format_network_policy_name(context.job.name)}"
    for place, refusal in sorted(context.observed.refusals.items()):
        kind, _, name = place.partition("/")
        if place == own_condition or (kind == "Pod" and name not in pods):
            continue
        yield refusal.reason, refusal.sentence.rstrip(". ")


def _describe_pending_deletion(pod: PodView) -> str:
    if pod.finalizers:
        return f"pod {pod.name} was deleted and waits for its finalizers: {', '.join(pod.finalizers[:_MAX_SHOWN])}"
    return f"pod {pod.name} was deleted, but the kubelet of node {pod.node} has not reported its end: does it run?"


def _describe_stray(stray: StrayPod, namespace: str) -> str:
    why = (
        f"its label {stray.missing_label} was removed or changed"
        if stray.missing_label
        else "no TrainingJob controls it"
    )
    place = f"keeps node {stray.node}" if stray.node else "waits for a node"
    return (
        f"pod {stray.name} is not a worker of this job, because {why}, and {place}: "
        f"kubectl delete pod {stray.name} -n {namespace}"
    )
