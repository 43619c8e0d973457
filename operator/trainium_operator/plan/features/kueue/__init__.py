"""Request quota from a queue of Kueue, and use what it grants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.features.kueue import admission, requests
from trainium_operator.plan.view.facts import Feature

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import Observed, PlanSettings


def _is_used(observed: Observed, settings: PlanSettings) -> bool:  # noqa: ARG001 - a hook
    left = observed.quota is not None and bool(observed.quota.workloads)
    return bool(observed.job.spec.scheduling.queue_name) or left


FEATURE = Feature(
    name="Kueue",
    is_used=_is_used,
    admit=admission.admit,
    place_pods=admission.place_pods,
    place_pod_set=admission.place_pod_set,
    reconcile=requests.reconcile_quota,
    finish=requests.release_quota,
)
