"""Names of the training state: Hugging Face's parameter names in, flat checkpoint names out.

Invariant: a name never depends on how the state is divided, so a checkpoint of any size can be read at any other.
"""

from __future__ import annotations

from enum import StrEnum


class StateKind(StrEnum):
    """The three values that every parameter has in the state."""

    WEIGHT = "model"
    EXP_AVG = "optimizer.expAvg"
    EXP_AVG_SQ = "optimizer.expAvgSq"


OPTIMIZER_STEP = "optimizer.step"
"""Number of updates that the moments have seen; an int64 scalar."""


def state_name(part: StateKind, parameter: str) -> str:
    """Checkpoint name of one value of a parameter."""
    return f"{part}.{parameter}"


def parameter_of(name: str) -> str | None:
    """Hugging Face's parameter name of a weight's checkpoint name; None for the optimizer's values."""
    prefix = f"{StateKind.WEIGHT}."
    return name.removeprefix(prefix) if name.startswith(prefix) else None
