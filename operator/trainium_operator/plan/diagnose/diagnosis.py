"""The outcome of the diagnosis: who is lost, who is about to leave, when to look again. A value; nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_operator.plan.diagnose.interruption_notices import heed_notices
from trainium_operator.plan.diagnose.losses import find_losses

if TYPE_CHECKING:
    from trainium_operator.plan.diagnose.loss import Loss
    from trainium_operator.plan.model.actions import EventIntent
    from trainium_operator.plan.view.facts import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is wrong with the members of the generation in force."""

    losses: tuple[Loss, ...]
    """Those that cannot go on or leave now, the most telling cause first."""
    leaving_since: float | None
    """Since when a notice stands that a member's node will leave (Unix seconds); None for none."""
    looks: tuple[float, ...]
    """When to look again (Unix seconds)."""
    notes: tuple[EventIntent, ...]


def diagnose(facts: Facts) -> Diagnosis:
    """Look at every member once."""
    losses, looks = find_losses(facts)
    notices = heed_notices(facts, losses)
    return Diagnosis(
        losses=losses + notices.departures,
        leaving_since=notices.since,
        looks=looks + notices.looks,
        notes=notices.notes,
    )
