"""List the optional features; a plan runs those that its job uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.features import dra, evaluation, gang, idle_nodes, kueue, network_policy, roles

if TYPE_CHECKING:
    from trainium_operator.plan.view.facts import Feature

FEATURES: tuple[Feature, ...] = (
    dra.FEATURE,
    idle_nodes.FEATURE,
    gang.FEATURE,
    kueue.FEATURE,
    network_policy.FEATURE,
    evaluation.FEATURE,
    roles.FEATURE,
)
