"""Curve and samples of a job that was hurt, against one that was left alone."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

ALLOWED = 1e-5
"""Relative difference of a loss, across sizes."""
_MOST_SENTENCES = 5


def losses_of(folder: Path) -> dict[int, float]:
    """Step -> loss, of the final history."""
    from trainium_devcluster.story.metrics import read_steps  # noqa: PLC0415 - not needed before a job runs

    return {step: record["loss"] for step, record in read_steps(folder / "metrics.jsonl").items()}


def samples_of(folder: Path) -> dict[int, list[int]]:
    """Step -> every sample that some rank saw in it, in order; one that was seen twice is there twice."""
    seen: dict[int, list[int]] = {}
    for path in folder.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                seen.setdefault(record["step"], []).extend(record["samples"])
    return {step: sorted(samples) for step, samples in seen.items()}


def worst_difference(hurt: Mapping[int, float], calm: Mapping[int, float]) -> tuple[float, int]:
    """The greatest relative difference of a loss, and its step, of those that both made."""
    both = [step for step in hurt if step in calm]
    return max(((abs(hurt[step] - calm[step]) / abs(calm[step]), step) for step in both), default=(0.0, 0))


def wrong_curve(hurt: Mapping[int, float], calm: Mapping[int, float]) -> Iterator[str]:
    """What is wrong with the losses, as sentences."""
    missing = [step for step in range(1, max(hurt, default=0) + 1) if step not in hurt]
    if missing:
        yield f"steps are missing in the history: {missing[:_MOST_SENTENCES]}"
    worst, step = worst_difference(hurt, calm)
    if not worst <= ALLOWED:
        yield f"the curve differs from the undisturbed one: by {worst:.1e} (relative) at step {step}"


def wrong_samples(hurt: Mapping[int, list[int]], calm: Mapping[int, list[int]], steps: int) -> Iterator[str]:
    """Each of the first `steps` steps must have seen the samples of the undisturbed run, each once."""
    odd = [step for step in range(1, steps + 1) if hurt.get(step) != calm.get(step)]
    for step in odd[:_MOST_SENTENCES]:
        yield f"step {step} saw {hurt.get(step)}, undisturbed {calm.get(step)}"
    if len(odd) > _MOST_SENTENCES:
        yield f"so did {len(odd) - _MOST_SENTENCES} further steps"
