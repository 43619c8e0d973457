"""Use idle nodes beyond the requested ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.job import IdleNodesStatus
from trainium_contract.spec.elasticity import IdleNodes
from trainium_operator.plan.features.idle_nodes import policy
from trainium_operator.plan.view.facts import Feature

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import Observed, PlanSettings


def _is_used(observed: Observed, settings: PlanSettings) -> bool:  # noqa: ARG001 - a hook
    takes = observed.job.spec.elasticity.idle_nodes is IdleNodes.TAKE
    return takes or observed.job.status.idle_nodes != IdleNodesStatus() or any(pod.extra for pod in observed.pods)


FEATURE = Feature(name="idle nodes", is_used=_is_used, resize=policy.use_idle_nodes)
