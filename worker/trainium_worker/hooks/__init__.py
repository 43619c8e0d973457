"""Report to the agent from the loops of `transformers`, Lightning and torchtitan, and from a plain loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIGURES = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
}
"""The names of figures in the logs of transformers and TRL, and in a report."""


def select_figures(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures in what a trainer logs, by their names in a report."""
    return {name: float(logs[logged]) for logged, name in _FIGURES.items() if logged in logs}
