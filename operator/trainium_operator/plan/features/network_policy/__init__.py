"""Restrict ingress to a job's workers by a NetworkPolicy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.features.network_policy import policy
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.view.facts import Feature

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import Observed, PlanSettings


def _is_used(observed: Observed, settings: PlanSettings) -> bool:
    reported = find_condition(observed.job.status, ConditionType.NETWORK_POLICY_APPLIED) is not None
    return settings.worker_ingress is not None or reported


FEATURE = Feature(name="network policy", is_used=_is_used, finalize=policy.reconcile_network_policy)
