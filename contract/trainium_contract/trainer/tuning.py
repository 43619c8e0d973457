"""`trainer.tuning`: which part of the model is trained, and the adapters of LoRA (arXiv 2106.09685).

A *pattern* is a shell pattern that is held against a module's or parameter's dotted name, and against the last part of
a module's name: `q_proj`, `*_proj`, `model.layers.3?.mlp.*`.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from trainium_contract.base import ContractModel

Pattern = Annotated[str, Field(min_length=1, max_length=256)]
_Path = Annotated[str, Field(min_length=1, max_length=1024)]


class TuningMethod(StrEnum):
    """Parameters that the optimizer updates."""

    FULL = "Full"
    """The model's own weights: all of them, or those that `trainable` names."""
    LORA = "LoRA"
    """Two narrow matrices beside each target, and what `trainable` names; all else is frozen."""


class LoraConfig(ContractModel):
    """LoRA: the output of a target W gets (scale x B A x) added; A begins random, B at zero."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rows of A and columns of B; at most the width of the narrowest target."""
    alpha: Annotated[float, Field(gt=0, le=1_000_000)] = 32.0
    """The scale is alpha over rank."""
    rank_stabilized: bool = False
    """Let the scale be alpha over the root of rank (rsLoRA, arXiv 2312.03732)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a target's inputs that A does not see; which ones follows from seed, sample and module alone."""
    targets: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=64)] = ("q_proj", "v_proj")
    """Patterns of the linear layers that get adapters."""
    adapter: _Path | None = None
    """A folder with an adapter in peft's format to start from; its rank, alpha and targets must be those given here."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class TuningConfig(ContractModel):
    """Trained part of the model; by default all of it."""

    method: TuningMethod = TuningMethod.FULL
    """Full, or LoRA."""
    trainable: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=64)] | None = None
    """Patterns of the model's own parameters that are trained. Omitted: all of them for `Full`, none for `LoRA`."""
    lora: LoraConfig = LoraConfig()
    """Adapters; looked at only by `LoRA`."""

    @property
    def freezes(self) -> bool:
        """Return whether any weight of the model stays as it is."""
        return self.method is TuningMethod.LORA or self.trainable is not None

    @model_validator(mode="after")
    def _adapter_is_for_lora(self) -> Self:
        if self.method is TuningMethod.FULL and self.lora.adapter is not None:
            raise ValueError("tuning.lora.adapter is given but tuning.method is Full: set tuning.method to LoRA")
        return self
