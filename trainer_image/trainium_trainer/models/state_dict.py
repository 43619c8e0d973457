"""Names of the training state: Hugging Face's parameter names in, flat checkpoint names out.

Invariant: a name never depends on how the state is divided, so a checkpoint of any size can be read at any other.
"""

from __future__ import annotations

WEIGHT = "model"
"""The part of the state with the weights."""
OPTIMIZER_STEP = "optimizer.step"
"""Number of updates that the moments have seen; an int64 scalar."""


def moment(name: str) -> str:
    """Return the part of the state with a moment of the optimizer, of the moment's name."""
    return f"optimizer.{name}"


def state_name(part: str, parameter: str) -> str:
    """Return the checkpoint name of one value of a parameter."""
    return f"{part}.{parameter}"


def parameter_of(name: str) -> str | None:
    """Return Hugging Face's parameter name of a weight's checkpoint name; None for the optimizer's values."""
    prefix = f"{WEIGHT}."
    return name.removeprefix(prefix) if name.startswith(prefix) else None
