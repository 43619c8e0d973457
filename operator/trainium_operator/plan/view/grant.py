"""What Kueue grants a job now, of all its Workloads: whether pods may be, how many, and what they get from flavors.

A job that names a queue has no pods without an admission. The first Workload is what the job needs; while it is not
admitted nothing runs, whatever further ones hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_operator.plan.manifests.placement import merged
from trainium_operator.plan.manifests.worker_pod import pod_template
from trainium_operator.plan.model.optional_api import ApiState
from trainium_operator.plan.model.quota import SPARES, WORKERS, Placement, WorkloadCondition

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import Observed, PlanSettings
    from trainium_operator.plan.model.quota import QuotaView, WorkloadView


class Stand(StrEnum):
    """How it stands between the job and Kueue."""

    UNKNOWN = "Unknown"
    """Kueue cannot be asked: what runs goes on, and nothing new begins."""
    WAITING = "Waiting"
    EVICTED = "Evicted"
    """Kueue wants the quota back; also after it was returned, until the next admission."""
    CONTRADICTION = "Contradiction"
    """It was admitted to nodes that no pod could be put on."""
    ADMITTED = "Admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What is granted."""

    stand: Stand
    message: str = ""
    """Why no pod may be, for people."""
    workers: int = 0
    spares: int = 0
    placements: tuple[tuple[str, Placement], ...] = ()
    """By pod set."""
    workload: str = ""
    """Name of the first Workload."""

    @property
    def releases(self) -> bool:
        """Whether no pod may stay."""
        return self.stand not in (Stand.ADMITTED, Stand.UNKNOWN)

    def placement(self, pod_set: str) -> Placement:
        """What pods of this pod set get; those of a set that was not asked for, what workers get."""
        found = dict(self.placements)
        return found.get(pod_set) or found.get(WORKERS) or Placement()


def granted(observed: Observed, settings: PlanSettings) -> Grant | None:
    """What is granted; None for a job without a queue."""
    queue = observed.job.spec.scheduling.queue_name
    if not queue:
        return None
    if observed.quota is None:
        return Grant(stand=Stand.UNKNOWN, message=_unknown(queue, settings.kueue))
    base = needed(observed.quota)
    if base is None:
        return Grant(stand=Stand.WAITING, message=f"quota is asked for in queue {queue}")
    if not base.admitted:
        return _waiting(queue, base)
    return _admitted(observed.quota, base, _own(observed, settings, base))


def needed(quota: QuotaView) -> WorkloadView | None:
    """The Workload of what the job needs."""
    return next((each for each in quota.workloads if each.part == 0), None)


def steps(quota: QuotaView) -> tuple[WorkloadView, ...]:
    """The Workloads of what the job would like beyond it, by part."""
    return tuple(each for each in quota.workloads if each.part > 0)


def _own(observed: Observed, settings: PlanSettings, base: WorkloadView) -> Placement:
    """Where the job's own template wants its pods. Kueue heeds it for flavors; what checks add may contradict it."""
    if not base.updates:
        return Placement()
    return Placement(node_selector=pod_template(observed.job, settings)["spec"].get("nodeSelector") or {})


def _admitted(quota: QuotaView, base: WorkloadView, own: Placement) -> Grant:
    placements: list[tuple[str, Placement]] = []
    counts: dict[str, int] = {}
    for each in base.grants:
        counts[each.name] = each.count
        missing = [name for name in each.flavors if name not in quota.flavors]
        if missing:
            return Grant(stand=Stand.CONTRADICTION, message=f"ResourceFlavor {missing[0]} does not exist any more")
        parts = [quota.flavors[name] for name in each.flavors]
        found, problem = merged([own, *parts, *([base.updates[each.name]] if each.name in base.updates else [])])
        if problem:
            message = f"{problem}: correct them, and delete Workload {base.name}"
            return Grant(stand=Stand.CONTRADICTION, message=message)
        placements.append((each.name, found))
    more = sum(grant.count for step in steps(quota) if step.admitted for grant in step.grants)
    return Grant(
        stand=Stand.ADMITTED,
        workers=counts.get(WORKERS, 0) + more,
        spares=counts.get(SPARES, 0),
        placements=tuple(placements),
        workload=base.name,
    )


def _waiting(queue: str, base: WorkloadView) -> Grant:
    evicted = base.find(WorkloadCondition.EVICTED)
    pending = base.find(WorkloadCondition.QUOTA_RESERVED)
    told = pending.message if pending is not None and not pending.true else ""
    if base.deleting or base.finished:
        over = "is being deleted" if base.deleting else "is finished, though the job is not"
        return Grant(stand=Stand.WAITING, message=f"Workload {base.name} {over}; then quota is asked for anew")
    if not base.active:
        message = f"Workload {base.name} is not active: set its spec.active to true to let the job go on"
        return Grant(stand=Stand.EVICTED, message=message)
    if evicted is not None and evicted.true:
        # Once it is queued again, why it waits says more than why it had to go.
        why = evicted.message if base.holds or not told else told
        return Grant(stand=Stand.EVICTED, message=f"evicted from queue {queue} ({evicted.reason}): {why}")
    if base.holds:
        return Grant(stand=Stand.WAITING, message=f"queue {queue} has quota for it; admission checks are not ready")
    return Grant(stand=Stand.WAITING, message=f"queue {queue}: {told or 'Kueue has not looked at it yet'}")


def _unknown(queue: str, state: ApiState) -> str:
    asked = f"queueName is {queue}, but"
    if state is ApiState.OFF:
        return f"{asked} this operator does not work with Kueue: set the chart's kueue.enabled, or clear it"
    if state is ApiState.ABSENT:
        return f"{asked} this cluster does not serve kueue.x-k8s.io/v1beta2: install Kueue, or clear it"
    return f"{asked} Kueue's objects are not read yet, or cannot be: the operator's log says which"
