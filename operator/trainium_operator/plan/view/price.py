"""What a change of the membership costs, as the newest one showed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.interruptions import Rung

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus

_NO_CHANGE = (Rung.IN_PLACE, Rung.STOP)


def price_of_a_change(status: PublicStatus) -> float | None:
    """Seconds from the newest decision on a membership to its first new step; None where none was measured."""
    for entry in reversed(status.history):
        if entry.rung not in _NO_CHANGE and entry.recovered_seconds is not None and entry.decided_at is not None:
            waited = max(0.0, entry.decided_at - (entry.failed_at or entry.decided_at))
            return max(0.0, entry.recovered_seconds - waited)
    return None
