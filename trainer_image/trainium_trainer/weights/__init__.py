"""Weights that others made: a base model's Hugging Face folder, read box by box, so that no rank holds all of it.

`shape_of` needs no torch; `BaseWeights` does, so it is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_trainer.weights.folder import shape_of

if TYPE_CHECKING:
    from trainium_trainer.weights.base import BaseWeights

__all__ = ["BaseWeights", "shape_of"]


def __getattr__(name: str) -> Any:
    if name == "BaseWeights":
        from trainium_trainer.weights.base import BaseWeights  # noqa: PLC0415 - see above

        return BaseWeights
    raise AttributeError(name)
