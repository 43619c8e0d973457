"""Policy: a straggler that no spare replaces is left out where the others are faster without it.

All ranks wait for the slowest at each step, so without it a step takes as much less as its own work is longer than that
of the next slowest. And the job has the best size for one node less, whose speed follows from the passes. Invariants:
fewer must be clearly faster, by what the ranks measure now, and pay for the change and for the way back in the steps
that are left; a size whose graphs are not there is no choice, and neither is one below the job's floor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.view.price import price_of_a_change

if TYPE_CHECKING:
    from trainium_operator.plan.view.facts import Facts

_CLEARLY = 1.05
"""So many times as fast it must be without it."""


def faster_without_one(facts: Facts) -> bool:
    """Whether the job is faster on fewer nodes than on all of them with the slowest one."""
    status, present = facts.job.status, len(facts.members)
    size = facts.size.legal_at_most(present - 1)
    speed = facts.size.speed(size, present)
    timings = [beat.timing for _, beat in facts.beats if beat.timing is not None]
    if not speed or len(timings) < max(2, present) or not _has_graphs(facts, size):
        return False
    second, slowest = sorted(timing.own_seconds for timing in timings)[-2:]
    step = max(timing.step_seconds for timing in timings)
    without = max(0.0, step - (slowest - second)) / speed
    if without * _CLEARLY > step:
        return False
    price, total = price_of_a_change(status), status.progress.total_steps
    if price is None or not total:
        return True
    return max(0, total - status.progress.step) * (step - without) > 2 * price


def _has_graphs(facts: Facts, size: int) -> bool:
    known = (*facts.size.compiled_first, *facts.job.status.compiled.sizes)
    return not facts.job.spec.precompile.enabled or size in known
