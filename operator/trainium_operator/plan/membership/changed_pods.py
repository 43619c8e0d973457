"""Report what admission changed in the pods of a new generation where that makes training slower or saves impossible.

LimitRanges and webhooks change pods when they are created, so only the stored pod shows the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import pluralize
from trainium_contract.wire.worker_env import compute_ranks_grace
from trainium_operator.plan.manifests.worker_needs import WORKER_CONTAINER
from trainium_operator.plan.manifests.worker_pod import build_pod_template
from trainium_operator.plan.model.actions import Event, build_event
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.view.context import PlanContext


def shorten_grace(context: PlanContext, member: Member) -> Member:
    """Return the member with the time that its pod leaves the ranks, where that is less than the job gives them."""
    worker = context.workers.get(member.pod_uid)
    if worker is None or worker.pod.grace_seconds is None:
        return member
    seconds = compute_ranks_grace(worker.pod.grace_seconds)
    if seconds >= context.job.spec.recovery.grace_period_seconds:
        return member
    return member.replaced(grace_seconds=seconds)


def report_changed_pods(context: PlanContext, members: tuple[Member, ...]) -> tuple[Event, ...]:
    """Report members whose ranks have less time to save, and those with limits that nobody requested for the job."""
    return (*_report_grace(context, members), *_report_limits(context, members))


def _report_grace(context: PlanContext, members: tuple[Member, ...]) -> tuple[Event, ...]:
    times = [member.grace_seconds for member in members if member.grace_seconds is not None]
    if not times:
        return ()
    asked = context.job.spec.recovery.grace_period_seconds
    note = (
        f"The ranks of {pluralize(len(times), 'worker')} have {min(times):g} s to save when they are stopped, not "
        f"the {asked} s of recovery.gracePeriodSeconds: a pod template, a webhook, or an earlier value of the field "
        "gave their pods a shorter terminationGracePeriodSeconds"
    )
    return (build_event(Reason.PODS_CHANGED, note, warning=True, series="grace"),)


def _report_limits(context: PlanContext, members: tuple[Member, ...]) -> tuple[Event, ...]:
    pods = [worker.pod for member in members if (worker := context.workers.get(member.pod_uid)) and worker.pod.limits]
    if not pods:
        return ()
    containers = build_pod_template(context.job, context.settings)["spec"]["containers"]
    worker_container = next(container for container in containers if container["name"] == WORKER_CONTAINER)
    requested = (worker_container.get("resources") or {}).get("limits") or {}
    added = {f"{name} {quantity}" for pod in pods for name, quantity in pod.limits if name not in requested}
    if not added:
        return ()
    note = (
        f"Workers have limits that the job does not set: {', '.join(sorted(added))}. A LimitRange of namespace "
        f"{context.job.namespace} or a webhook added them; give limits of your own in workers.template"
    )
    return (build_event(Reason.PODS_CHANGED, note, warning=True, series="limits"),)
