"""The figures of a step of a fake rank."""

from __future__ import annotations

from trainium_trainer.monitor.figures import StepFigures


def figures(step: int) -> StepFigures:
    """Return figures that differ from those of every other step."""
    return StepFigures(
        step=step,
        loss=1.0 / step,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=step,
        samples=step,
        batch=1,
        tokens_per_second=1.0,
    )
