"""Run the pods of `spec.roles`, which serve the training program and are no members of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.features.roles import policy, readiness
from trainium_operator.plan.view.facts import Feature

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import Observed, PlanSettings


def _is_used(observed: Observed, settings: PlanSettings) -> bool:  # noqa: ARG001 - a hook
    return bool(observed.job.spec.roles) or bool(observed.role_pods)


FEATURE = Feature(
    name="roles",
    is_used=_is_used,
    reconcile_before_pods=readiness.publish_endpoints,
    find_creation_blocker=readiness.find_creation_blocker,
    is_start_blocked=readiness.is_start_blocked,
    find_waiting_cause=readiness.find_waiting_cause,
    list_pod_sets=policy.list_pod_sets,
    count_pods=policy.count_pods,
    reconcile=policy.reconcile_roles,
    finish=policy.finish_roles,
)
