"""Measure the models of milestones in a pod beside the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.features.evaluation import policy
from trainium_operator.plan.view.facts import Feature

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import Observed, PlanSettings


def _is_used(observed: Observed, settings: PlanSettings) -> bool:  # noqa: ARG001 - a hook
    left = observed.evaluation is not None and observed.evaluation.pod is not None
    return observed.job.spec.workload.evaluates_milestones or left


FEATURE = Feature(
    name="evaluation", is_used=_is_used, reconcile=policy.reconcile_evaluation, finish=policy.reconcile_evaluation
)
