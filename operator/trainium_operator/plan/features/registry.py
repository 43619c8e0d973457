"""List the optional features; a plan runs those that its job uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.features import idle_nodes, network_policy
from trainium_operator.plan.features.dra import claims
from trainium_operator.plan.features.evaluation import policy as evaluation
from trainium_operator.plan.features.gang import groups
from trainium_operator.plan.features.kueue import requests
from trainium_operator.plan.features.roles import policy as roles

if TYPE_CHECKING:
    from trainium_operator.plan.view.context import Feature

FEATURES: tuple[Feature, ...] = (
    claims.FEATURE,
    idle_nodes.FEATURE,
    groups.FEATURE,
    requests.FEATURE,
    network_policy.FEATURE,
    evaluation.FEATURE,
    roles.FEATURE,
)
