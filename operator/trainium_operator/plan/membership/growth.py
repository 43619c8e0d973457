"""Decide when growth that nobody requested pays, and which size to use until then.

A size without compiled graphs costs its compilation. How long the job will stay at a size is unknown, so this is the
ski rental problem: the job uses the fastest compiled size, and leaves it for a faster one when the time lost by waiting
equals the cost of compiling. The loss is at most twice the least possible.

Growth must save more time in the remaining steps than the newest change of the membership took. It waits
`rescaleAfterSeconds` after a recovery or a shrink, doubled for each further shrink in the last hour, so that
intermittent capacity causes no flapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.interruptions import Interruption, Rung
from trainium_operator.plan.view.progress import resize_cost_seconds

if TYPE_CHECKING:
    from trainium_contract.status.internal import InternalStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.view.facts import Facts


_ASSUMED_SECONDS = 1200.0
"""To compile one size, if none was compiled in the background: a 7B model on trn1 takes tens of minutes."""


def compile_seconds(facts: Facts, status: PublicStatus, size: int) -> float:
    """Return by how much the first step at this size is longer without compiled graphs."""
    ready = _ready(facts, status)
    if not ready or size in ready:
        return 0.0
    return status.compiled.seconds or _ASSUMED_SECONDS


def available_size(facts: Facts, status: PublicStatus, nodes: int) -> int:
    """Return the best size for this number of nodes; 0 for none.

    It is the best compiled one where compiling costs more.
    """
    best = facts.size.legal_at_most(nodes)
    if compile_seconds(facts, status, best) <= (resize_cost_seconds(status) or 0.0):
        return best
    ready = [
        size for size in _ready(facts, status) if facts.size.floor <= size < best and facts.size.micro_batches(size)
    ]
    return max(ready, key=lambda size: (facts.size.speed(size), -size), default=best)


def worthwhile_at(facts: Facts, status: PublicStatus, size: int, since: float) -> float:
    """Return when growing from the current size, used `since`, to an uncompiled one pays (Unix seconds)."""
    price = compile_seconds(facts, status, size)
    speed = facts.size.speed(len(facts.members), size)
    return since + price / (1 - speed) if price and 0 < speed < 1 else since


def _ready(facts: Facts, status: PublicStatus) -> frozenset[int]:
    """Return the compiled sizes; empty if they are not known."""
    return frozenset((*facts.size.compiled_first, *status.compiled.sizes))


def is_worth_growing(facts: Facts, status: PublicStatus, present: int, size: int, *, beside: float) -> bool:
    """Return whether growing from `present` to `size` nodes saves more time than it costs, plus `beside` seconds."""
    speed = facts.size.speed(present, size)
    step = next((each.step_seconds for each in status.goodput.sizes if each.size == present), None)
    price, total = resize_cost_seconds(status), status.progress.total_steps
    if step is None or price is None or not total or not speed:
        return True
    left = max(0, total - status.progress.step)
    return left * step * (1 - speed) > price + beside


_FLAPPING_SECONDS = 3600.0
_LONGEST_REST = 8.0


def growth_resumes_at(facts: Facts, status: PublicStatus) -> float:
    """Return until when growth that nobody requested is paused (Unix seconds).

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
        return entry.cause is Cause.CAPACITY  # released; the others were requested by a user or a queue
    return entry.rung not in (Rung.GROW, Rung.STOP)


def rescale_at(facts: Facts, memory: InternalStatus) -> float:
    """Return when the job continues with the available workers (Unix seconds)."""
    return (memory.waiting_since or facts.now) + facts.job.spec.recovery.rescale_after_seconds
