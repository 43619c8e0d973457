"""Workloads of Kueue as the operator observes them, by default admitted with flavor `blue`."""

from dataclasses import replace
from typing import Any

from trainium_operator.plan.model.quota import (
    PodSetGrant,
    WorkloadCondition,
    WorkloadConditionView,
    WorkloadView,
)

WORKERS, SPARES = "workers", "spares"


def workload_condition(
    kind: WorkloadCondition, true: bool = True, reason: str = "R", message: str = "why"
) -> WorkloadConditionView:
    return WorkloadConditionView(kind, is_true=true, reason=reason, message=message)


ADMITTED = (workload_condition(WorkloadCondition.QUOTA_RESERVED), workload_condition(WorkloadCondition.ADMITTED))
PREEMPTED = workload_condition(WorkloadCondition.EVICTED, reason="Preempted", message="by another workload")
EVICTED = (*ADMITTED, PREEMPTED)


def workload(
    part: int, workers: int, spares: int = 0, roles: dict[str, int] | None = None, **changes: Any
) -> WorkloadView:
    """Return an admitted Workload of so many workers and spares, and of the pods of each role."""
    sets = {WORKERS: workers, SPARES: spares, **{f"role-{role}": count for role, count in (roles or {}).items()}}
    counts = {name: count for name, count in sets.items() if count}
    view = WorkloadView(
        name=f"demo-quota-{part}",
        uid=f"workload-{part}",
        version="7",
        part=part,
        requested_pods=counts,
        conditions=ADMITTED,
        grants=tuple(PodSetGrant(name=name, count=count, flavors=("blue",)) for name, count in counts.items()),
    )
    return replace(view, **changes)
