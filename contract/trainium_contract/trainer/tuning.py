"""`trainer.tuning`: which part of the model is trained, by which loss, and the adapters of LoRA (arXiv 2106.09685).

A *pattern* is a shell pattern that is matched against the dotted name of a module or parameter, and against the last
part of a module's name: `q_proj`, `*_proj`, `model.layers.3?.mlp.*`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Self, TypeVar

from pydantic import Field, model_validator

from trainium_contract.base import ContractModel, derived

Pattern = Annotated[str, Field(min_length=1, max_length=256)]
_Path = Annotated[str, Field(min_length=1, max_length=1024)]


class TuningMethod(StrEnum):
    """Parameters that the optimizer updates."""

    FULL = "Full"
    """The model's own weights: all of them, or those that `trainable` names."""
    LORA = "LoRA"
    """Two narrow matrices beside each target, and what `trainable` names; all else is frozen."""


_Value = TypeVar("_Value", int, float)


def matches_module(module: str, pattern: str) -> bool:
    """Return whether a pattern matches a module by its whole name or by its last part."""
    return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module.rpartition(".")[2], pattern)


def _find_by_pattern(values: Mapping[str, _Value], module: str, otherwise: _Value) -> _Value:
    """Return the value of the first pattern, in alphabetical order, that matches a module."""
    return next((values[pattern] for pattern in sorted(values) if matches_module(module, pattern)), otherwise)


def _is_unset(value: object) -> bool:
    """Return whether a field is omitted when written, so that checkpoints of runs without it stay equal."""
    return not value


class LoraConfig(ContractModel):
    """LoRA: the output of a target W gets (scale x B A x) added; A starts random, B at zero."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rows of A and columns of B; at most the width of the narrowest target."""
    alpha: Annotated[float, Field(gt=0, le=1_000_000)] = 32.0
    """The scale is alpha over rank."""
    rank_stabilized: bool = False
    """Let the scale be alpha over the root of rank (rsLoRA, arXiv 2312.03732)."""
    dora: Annotated[bool, Field(exclude_if=_is_unset)] = False
    """Also train the length of each row of a target's weight, apart from its direction (DoRA, arXiv 2402.09353)."""
    rank_pattern: Annotated[
        dict[str, Annotated[int, Field(ge=1, le=4096)]], Field(max_length=64, exclude_if=_is_unset)
    ] = {}
    """Ranks of single targets, by pattern, in place of `rank`."""
    alpha_pattern: Annotated[
        dict[str, Annotated[float, Field(gt=0, le=1_000_000)]], Field(max_length=64, exclude_if=_is_unset)
    ] = {}
    """Alphas of single targets, by pattern, in place of `alpha`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a target's inputs that A does not receive; the choice follows from seed, sample and module alone."""
    targets: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=64)] = ("q_proj", "v_proj")
    """Patterns of the linear layers that get adapters."""
    adapter: _Path | None = None
    """A folder with an adapter in peft's format to start from; its rank, alpha and targets must be those given here."""

    def rank_of(self, module: str) -> int:
        """Return the rank of the adapter beside a module."""
        return _find_by_pattern(self.rank_pattern, module, self.rank)

    def find_alpha(self, module: str) -> float:
        """Return the alpha of the adapter beside a module."""
        return _find_by_pattern(self.alpha_pattern, module, self.alpha)

    def find_scale(self, module: str) -> float:
        """Return the factor of the product of the adapter beside a module."""
        rank = self.rank_of(module)
        return self.find_alpha(module) / (math.sqrt(rank) if self.rank_stabilized else rank)


class ObjectiveKind(StrEnum):
    """Losses on pairs of a preferred and another answer."""

    DPO = "DPO"
    """Direct preference optimization (arXiv 2305.18290)."""


BASE_REFERENCE = "Base"
"""Value of `reference` that names the model in `model.weights`."""


class ObjectiveConfig(ContractModel):
    """Loss on the pairs of data.format Preference, averaged over the pairs of the global batch."""

    kind: ObjectiveKind = ObjectiveKind.DPO
    """DPO."""
    beta: Annotated[float, Field(gt=0, le=1000)] = 0.1
    """Factor of the log-probability ratios to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, le=0.49)] = 0.0
    """Assumed share of pairs whose answers are swapped (conservative DPO)."""
    reference: _Path = BASE_REFERENCE
    """The reference model. `Base` is model.weights as it is, without an adapter; else a folder or s3://bucket/prefix
    with a model of the same shape."""


class TuningConfig(ContractModel):
    """Trained part of the model, by default all of it, and the loss."""

    method: TuningMethod = derived(TuningMethod.FULL)
    """Full, or LoRA. Omitted: LoRA if `lora` is given, else Full."""
    trainable: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=64)] | None = None
    """Patterns of the model's own parameters that are trained. Omitted: all of them for `Full`, none for `LoRA`."""
    lora: LoraConfig = derived(LoraConfig())
    """Adapters of `LoRA`. Omitted: all defaults."""
    objective: ObjectiveConfig | None = None
    """Loss on pairs of answers, with data.format Preference. Omitted: cross-entropy of the next token."""

    @property
    def freezes(self) -> bool:
        """Return whether any weight of the model is frozen."""
        return self.method is TuningMethod.LORA or self.trainable is not None

    @model_validator(mode="after")
    def _imply_method(self) -> Self:
        if "lora" in self.model_fields_set:
            self.set_if_omitted("method", TuningMethod.LORA)
        return self
