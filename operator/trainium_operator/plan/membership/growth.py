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
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_operator.plan.view.progress import measure_resize_seconds

if TYPE_CHECKING:
    from trainium_contract.status.internal import InternalStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.view.context import PlanContext


_ASSUMED_COMPILE_SECONDS = 1200.0
"""To compile one size, if none was compiled in the background: a 7B model on trn1 takes tens of minutes."""


def estimate_compile_seconds(context: PlanContext, status: PublicStatus, size: int) -> float:
    """Return by how much the first step at this size is longer without compiled graphs."""
    compiled = _list_compiled_sizes(context, status)
    if not compiled or size in compiled:
        return 0.0
    return status.compiled.seconds or _ASSUMED_COMPILE_SECONDS


def find_available_size(context: PlanContext, status: PublicStatus, nodes: int) -> int:
    """Return the best size for this number of nodes; 0 for none.

    It is the best compiled one where compiling costs more.
    """
    best = context.size.find_legal_size(nodes)
    if estimate_compile_seconds(context, status, best) <= (measure_resize_seconds(status) or 0.0):
        return best
    compiled = [
        size
        for size in _list_compiled_sizes(context, status)
        if context.size.floor <= size < best and context.size.count_micro_batches(size)
    ]
    return max(compiled, key=lambda size: (context.size.compute_speed(size), -size), default=best)


def compute_worthwhile_time(context: PlanContext, status: PublicStatus, size: int, since: float) -> float:
    """Return when growing from the current size, used `since`, to an uncompiled one pays (Unix seconds)."""
    cost_seconds = estimate_compile_seconds(context, status, size)
    speed = context.size.compute_speed(len(context.members), size)
    return since + cost_seconds / (1 - speed) if cost_seconds and 0 < speed < 1 else since


def _list_compiled_sizes(context: PlanContext, status: PublicStatus) -> frozenset[int]:
    """Return the compiled sizes; empty if they are not known."""
    return frozenset((*context.size.compiled_first, *status.compiled.sizes))


def is_worth_growing(
    context: PlanContext, status: PublicStatus, present: int, size: int, *, extra_seconds: float
) -> bool:
    """Return whether growing from `present` to `size` nodes saves more time than it and `extra_seconds` cost."""
    speed = context.size.compute_speed(present, size)
    step_seconds = next((account.step_seconds for account in status.goodput.sizes if account.size == present), None)
    resize_seconds, total_steps = measure_resize_seconds(status), status.progress.total_steps
    if step_seconds is None or resize_seconds is None or not total_steps or not speed:
        return True
    remaining_steps = max(0, total_steps - status.progress.step)
    return remaining_steps * step_seconds * (1 - speed) > resize_seconds + extra_seconds


_FLAPPING_SECONDS = 3600.0
_MAX_REST_FACTOR = 8.0


def find_growth_resume_time(context: PlanContext, status: PublicStatus) -> float:
    """Return until when growth that nobody requested is paused (Unix seconds).

    `rescaleAfterSeconds` after the last recovery or shrink, doubled for each further shrink in the last hour, up to
    eightfold.
    """
    faults = [entry for entry in status.history if _delays_growth(entry)]
    ends = [(entry.failed_at or 0.0) + (entry.recovered_seconds or 0.0) for entry in faults]
    shrinks = sum(
        entry.response in (RecoveryResponse.SHRINK, RecoveryResponse.RESIZE) and end > context.now - _FLAPPING_SECONDS
        for entry, end in zip(faults, ends, strict=True)
    )
    factor = min(_MAX_REST_FACTOR, 2.0 ** max(0, shrinks - 1))
    return max(ends, default=0.0) + context.job.spec.recovery.rescale_after_seconds * factor


def _delays_growth(entry: Interruption) -> bool:
    if entry.response is RecoveryResponse.RESIZE:
        return entry.cause is Cause.CAPACITY  # released; the others were requested by a user or a queue
    return entry.response not in (RecoveryResponse.GROW, RecoveryResponse.SUSPEND, RecoveryResponse.STOP)


def find_rescale_time(context: PlanContext, memory: InternalStatus) -> float:
    """Return when the job continues with the available workers (Unix seconds)."""
    return (memory.waiting_since or context.now) + context.job.spec.recovery.rescale_after_seconds
