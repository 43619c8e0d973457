"""Measure the reference step time, and count the steps of the final history at that time.

Invariants: a step counts once, at the size at which it was first completed. The reference of a size is the median of a
window without interruptions, and falls only when a later window is clearly faster (the first one was slow), so noise
does not lower it. The number of stored sizes and samples is bounded.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from trainium_contract.status.internal import WINDOW_SAMPLES, StepWindow
from trainium_contract.status.ledger import MAX_SIZES, SizeAccount

if TYPE_CHECKING:
    from trainium_contract.job import GoodputStatus
    from trainium_contract.sizes import BatchShape
    from trainium_operator.plan.view.context import PlanContext

_CLEARLY_FASTER = 0.95
_TIMED_STEPS = 5
"""Steps that an agent's median must cover."""


def count_steps(context: PlanContext, goodput: GoodputStatus) -> tuple[GoodputStatus, int, float]:
    """Count the new steps: return the ledger with them, their number, and when the newest ended (agent's clock)."""
    progress = context.newest_progress
    if progress is None:
        return goodput, 0, 0.0
    counted = goodput.counted_step
    if counted < 0:
        # A job may resume from the checkpoint of an earlier one, whose steps are not its own.
        counted = min(progress.step, progress.resume_step or 0)
    new_steps = max(0, progress.step - counted)
    if new_steps:
        goodput = _add_steps(goodput, len(context.members), new_steps, context.job.spec.batch_shape())
    return goodput.replaced(counted_step=counted + new_steps), new_steps, progress.updated


def find_reference_seconds(goodput: GoodputStatus, size: int, shape: BatchShape) -> float | None:
    """Return the reference step time at this size; without one, scaled from another size by the passes of a step."""
    exact = next((account.step_seconds for account in goodput.sizes if account.size == size), None)
    if exact is not None or size == 0:
        return exact
    timed = [account for account in goodput.sizes if account.step_seconds is not None]
    return (timed[-1].step_seconds or 0.0) * _compute_step_time_ratio(timed[-1].size, size, shape) if timed else None


def _compute_step_time_ratio(measured_size: int, size: int, shape: BatchShape) -> float:
    """Return how much longer a step takes at `size` than at `known`."""
    before, after = shape.micro_batches(measured_size), shape.micro_batches(size)
    # A size that the present batch does not allow was used with an earlier batch.
    return after / before if before and after else measured_size / size


def compute_productive_seconds(goodput: GoodputStatus, shape: BatchShape) -> tuple[float, float] | None:
    """Return the counted steps at their reference in seconds and in node seconds; None without any reference."""
    seconds, node_seconds = goodput.earlier_seconds, goodput.earlier_node_seconds
    for account in goodput.sizes:
        reference = find_reference_seconds(goodput, account.size, shape)
        if reference is None:
            return None
        seconds += account.steps * reference
        node_seconds += account.steps * reference * account.size
    return (seconds, node_seconds) if goodput.sizes or seconds else None


def sample_step_time(context: PlanContext, goodput: GoodputStatus, *, clean: bool) -> GoodputStatus:
    """Add a sample of the step time since the last one, if nothing interrupted training in between."""
    window, size, progress = goodput.window, len(context.members), context.newest_progress
    if not clean or progress is None or progress.updated <= 0:
        kept = window.samples if window.size == size else ()
        return goodput.replaced(window=StepWindow(size=size, samples=kept))
    if window.size != size or window.at is None or progress.step < window.step:
        kept = window.samples if window.size == size else ()
        new_window = StepWindow(size=size, step=progress.step, at=progress.updated, samples=kept)
        return goodput.replaced(window=new_window)
    if progress.step == window.step or progress.updated <= window.at:
        return goodput
    sample = _find_median_step_seconds(context) or (progress.updated - window.at) / (progress.step - window.step)
    samples = (*window.samples, round(sample, 6))
    goodput = _update_reference(goodput, size, samples, context.job.spec.batch_shape())
    kept = () if len(samples) >= WINDOW_SAMPLES else samples
    new_window = StepWindow(size=size, step=progress.step, at=progress.updated, samples=kept)
    return goodput.replaced(window=new_window)


def _find_median_step_seconds(context: PlanContext) -> float | None:
    """Return the agents' median step time; None if they do not measure it."""
    reported = [
        heartbeat.timing.step_seconds
        for _, heartbeat in context.heartbeats
        if heartbeat.timing and heartbeat.timing.steps >= _TIMED_STEPS
    ]
    return median(reported) if reported and min(reported) > 0 else None


def _update_reference(
    goodput: GoodputStatus, size: int, samples: tuple[float, ...], shape: BatchShape
) -> GoodputStatus:
    """Set the reference by a full window, or lower it; until the first is full, use the samples so far."""
    value = round(median(samples), 6)
    account = next((entry for entry in goodput.sizes if entry.size == size), SizeAccount(size=size))
    is_full, old_seconds = len(samples) >= WINDOW_SAMPLES, account.step_seconds
    if old_seconds is None or not account.settled or (is_full and value < _CLEARLY_FASTER * old_seconds):
        account = account.replaced(step_seconds=value, settled=account.settled or is_full)
    return _add_account(goodput, account, shape)


def _add_steps(goodput: GoodputStatus, size: int, steps: int, shape: BatchShape) -> GoodputStatus:
    account = next((entry for entry in goodput.sizes if entry.size == size), SizeAccount(size=size))
    return _add_account(goodput, account.replaced(steps=account.steps + steps), shape)


def _add_account(goodput: GoodputStatus, account: SizeAccount, shape: BatchShape) -> GoodputStatus:
    """Add this account as the newest; the oldest beyond the limit becomes a plain sum."""
    sizes = [other for other in goodput.sizes if other.size != account.size]
    seconds, node_seconds = goodput.earlier_seconds, goodput.earlier_node_seconds
    while len(sizes) >= MAX_SIZES:
        oldest = sizes.pop(0)
        past_seconds = oldest.steps * (find_reference_seconds(goodput, oldest.size, shape) or 0.0)
        seconds, node_seconds = seconds + past_seconds, node_seconds + past_seconds * oldest.size
    return goodput.replaced(
        sizes=(*sizes, account), earlier_seconds=round(seconds, 3), earlier_node_seconds=round(node_seconds, 3)
    )
