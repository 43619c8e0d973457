"""Create the pods that a job starts with as one group of a gang scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.spec.scheduling import Gang
from trainium_operator.plan.features.gang import groups
from trainium_operator.plan.view.facts import Feature

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import Observed, PlanSettings


def _is_used(observed: Observed, settings: PlanSettings) -> bool:
    wanted = observed.job.spec.scheduling.gang
    served = wanted is Gang.AUTO and bool(settings.gang_apis)
    return served or wanted in (Gang.NATIVE, Gang.COSCHEDULING) or any(pod.gang for pod in observed.pods)


FEATURE = Feature(
    name="gang scheduling",
    is_used=_is_used,
    group_pods=groups.group_pods,
    creates_as_a_whole=groups.needs_whole_gang,
    is_misplaced=groups.is_misplaced,
    describe_wait=groups.describe_wait,
)
