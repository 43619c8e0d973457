"""Policy: growth that nobody asked for rests after a recovery or a shrink: capacity that comes and goes must not flap.

A node that was taken beyond those that were asked for and had to be given back counts as a shrink.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.interruptions import Rung

if TYPE_CHECKING:
    from trainium_contract.status.interruptions import Interruption
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.view.facts import Facts

_FLAPPING_SECONDS = 3600.0
_LONGEST_REST = 8.0


def grows_again_at(facts: Facts, status: PublicStatus) -> float:
    """Until when growth that nobody asked for rests (Unix seconds).

    `rescaleAfterSeconds` after the last recovery or shrink, doubled for each further shrink in the last hour, up to
    eightfold.
    """
    faults = [entry for entry in status.history if _counts(entry)]
    ends = [(entry.failed_at or 0.0) + (entry.recovered_seconds or 0.0) for entry in faults]
    shrinks = sum(
        entry.rung in (Rung.SHRINK, Rung.RESIZE) and end > facts.now - _FLAPPING_SECONDS
        for entry, end in zip(faults, ends, strict=True)
    )
    factor = min(_LONGEST_REST, 2.0 ** max(0, shrinks - 1))
    return max(ends, default=0.0) + facts.job.spec.recovery.rescale_after_seconds * factor


def _counts(entry: Interruption) -> bool:
    if entry.rung is Rung.RESIZE:
        return entry.cause is Cause.CAPACITY  # given back; the other ones were asked for by a person or a queue
    return entry.rung not in (Rung.GROW, Rung.STOP)
