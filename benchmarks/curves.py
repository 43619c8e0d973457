"""Compare the losses and samples of a run with those of an undisturbed run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SENTENCES = 5


def _difference(loss: float, reference: float | None) -> float:
    difference = float("inf") if reference is None else abs(loss - reference) / abs(reference)
    return difference if difference == difference else float("inf")  # noqa: PLR0124 - NaN


def compare_losses(losses: Mapping[int, float], reference: Mapping[int, float], tolerance: float) -> Iterator[str]:
    """Yield a sentence for missing steps and one for a curve that differs by more than the relative tolerance."""
    missing = [step for step in range(1, max(losses, default=0) + 1) if step not in losses]
    if missing:
        yield f"steps are missing in the history: {missing[:_SENTENCES]}"
    differences = ((_difference(loss, reference.get(step)), step) for step, loss in losses.items())
    worst, step = max(differences, default=(0.0, 0))
    if worst > tolerance:
        yield f"the curve differs from the undisturbed one: by {worst:.1e} (relative) at step {step}"


def check_batches(samples: Mapping[int, list[int]], steps: int, batch: int) -> Iterator[str]:
    """Yield a sentence for each of the first `steps` steps without a whole batch of new samples, within an epoch."""
    seen: set[int] = set()
    wrong = []
    for step in range(1, steps + 1):
        of_step = samples.get(step, [])
        if len(of_step) != batch or len(set(of_step) - seen) != batch:
            wrong.append(f"step {step} saw {of_step}")
        seen.update(of_step)
    yield from wrong[:_SENTENCES]
    if len(wrong) > _SENTENCES:
        yield f"so did {len(wrong) - _SENTENCES} more steps"
