"""Read the losses and samples of a run, and compare them with those of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_SENTENCES = 5


def read_losses(folder: Path) -> dict[int, float]:
    """Return step -> loss of the final history."""
    from trainium_devcluster.demos.metrics import read_steps  # noqa: PLC0415 - not needed before a job runs

    return {step: float(record["loss"]) for step, record in read_steps(folder / "metrics.jsonl").items()}


def read_samples(folder: Path) -> dict[int, list[int]]:
    """Return step -> the samples of all ranks, sorted; a sample that was seen twice is there twice."""
    found: dict[int, list[int]] = {}
    for path in folder.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that is being written
                record = json.loads(line)
                found.setdefault(record["step"], []).extend(record["samples"])
    return {step: sorted(samples) for step, samples in sorted(found.items())}


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
