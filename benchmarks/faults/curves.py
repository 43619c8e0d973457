"""Compare the losses and the samples of a job with faults with those of an undisturbed one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MAX_SENTENCES = 5


def _compute_relative_difference(loss: float, reference: float | None) -> float:
    difference = float("inf") if reference is None else abs(loss - reference) / abs(reference)
    return difference if difference == difference else float("inf")  # noqa: PLR0124 - NaN


def compare_losses(losses: Mapping[int, float], reference: Mapping[int, float], tolerance: float) -> Iterator[str]:
    """Yield a sentence for missing steps and one for a curve that differs by more than the relative tolerance."""
    missing = [step for step in range(1, max(losses, default=0) + 1) if step not in losses]
    if missing:
        yield f"steps are missing in the history: {missing[:_MAX_SENTENCES]}"
    differences = ((_compute_relative_difference(loss, reference.get(step)), step) for step, loss in losses.items())
    worst, step = max(differences, default=(0.0, 0))
    if worst > tolerance:
        yield f"the curve differs from the undisturbed one: by {worst:.1e} (relative) at step {step}"


def check_batches(samples: Mapping[int, list[int]], steps: int, batch: int) -> Iterator[str]:
    """Yield a sentence for each of the first `steps` steps without a whole batch of samples new in the epoch."""
    every_sample = set(range(1 + max((sample for seen in samples.values() for sample in seen), default=0)))
    unseen, wrong = every_sample, []
    for step in range(1, steps + 1):
        batch_samples = samples.get(step, [])
        distinct = set(batch_samples)
        repeated, unseen = distinct - unseen, unseen - distinct
        # The batch in which an epoch ends has samples of two.
        if len(batch_samples) != batch or len(distinct) != batch or (repeated and unseen):
            wrong.append(f"step {step} saw {batch_samples}")
        unseen = unseen or every_sample - repeated
    yield from wrong[:_MAX_SENTENCES]
    if len(wrong) > _MAX_SENTENCES:
        yield f"so did {len(wrong) - _MAX_SENTENCES} more steps"
