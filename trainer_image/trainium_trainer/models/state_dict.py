"""Map Hugging Face's parameter names to the flat names of the training state in checkpoints.

Guarantees:
- A name never depends on how the state is divided, so a checkpoint of any size can be read at any other.
"""

from __future__ import annotations

WEIGHT = "model"
"""The section of the state with the weights."""
OPTIMIZER_STEP = "optimizer.step"
"""The number of updates in the moments; an int64 scalar."""


def find_moment(name: str) -> str:
    """Return the section of the state with the named moment of the optimizer."""
    return f"optimizer.{name}"


def format_state_name(part: str, parameter: str) -> str:
    """Return the checkpoint name of one value of a parameter."""
    return f"{part}.{parameter}"


def parse_parameter_name(name: str) -> str | None:
    """Return Hugging Face's parameter name of a weight's checkpoint name; None for the optimizer's values."""
    prefix = f"{WEIGHT}."
    return name.removeprefix(prefix) if name.startswith(prefix) else None
