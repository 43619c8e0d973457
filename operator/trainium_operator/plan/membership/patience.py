"""Policy: a job that lacks workers waits `recovery.rescaleAfterSeconds` for them, then it makes do with fewer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.status.internal import InternalStatus
    from trainium_operator.plan.view.facts import Facts


def makes_do_at(facts: Facts, memory: InternalStatus) -> float:
    """When the job makes do with the workers that are there (Unix seconds)."""
    return (memory.waiting_since or facts.now) + facts.job.spec.recovery.rescale_after_seconds
