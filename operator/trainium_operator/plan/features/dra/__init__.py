"""Claim devices (dynamic resource allocation) instead of extended resources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.features.dra import claims, template
from trainium_operator.plan.view.facts import Feature

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import Observed, PlanSettings


def _is_used(observed: Observed, settings: PlanSettings) -> bool:  # noqa: ARG001 - a hook
    claimed = observed.job.spec.workers.accelerator.claim is not None
    return claimed or observed.devices is not None or any(pod.device_health for pod in observed.pods)


FEATURE = Feature(
    name="claimed devices",
    is_used=_is_used,
    pod_fields=template.pod_claim_fields,
    node_problems=claims.find_device_problems,
    reconcile_before_pods=claims.reconcile_templates,
    find_creation_blocker=claims.find_claim_blocker,
    describe_capacity=claims.describe_free_devices,
)
