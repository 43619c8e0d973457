"""Define every number of a model.

Guarantees:
- A shape is complete: network, parameters, memory and `config.json` follow from it.
- `to_json` omits what a plain Llama does not have, so the digest of a shape does not change when a field is added.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any


class RopeScalingKind(StrEnum):
    """Scaling of the rotary embedding to longer sequences."""

    UNSCALED = "Unscaled"
    """None; disables the scaling of the preset or the configuration file."""
    LINEAR = "Linear"
    """All frequencies divided by `factor`."""
    LLAMA3 = "Llama3"
    """Low frequencies divided by `factor`, high ones kept, a smooth change between: Llama 3.1 and 3.2."""
    DYNAMIC = "Dynamic"
    """A larger base for sequences beyond the model's longest ("dynamic NTK")."""
    YARN = "YaRN"
    """By the number of turns as in Llama3, with scaled attention scores (arXiv 2309.00071)."""


class QueryKeyNorm(StrEnum):
    """Normalization of queries and keys before they are rotated."""

    NONE = "none"
    EACH_HEAD = "each head"
    ALL_HEADS = "all heads"
    """All heads of a token together."""


class NormPlacement(StrEnum):
    """Which ends of the two branches of a layer are normalized."""

    INPUTS = "inputs"
    OUTPUTS = "outputs"
    BOTH = "both"


class Activation(StrEnum):
    """The function of the feed-forward's gate, by `transformers`' name."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    """GELU by its approximation with tanh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeStretch:
    """Scaling of the rotary embedding; fields that `kind` does not use are 0."""

    kind: RopeScalingKind
    factor: float
    low_frequency_factor: float = 0.0
    high_frequency_factor: float = 0.0
    original_max_positions: int = 0
    fast_turns: float = 0.0
    """YaRN: pairs that turn more often than this within the original positions are kept."""
    slow_turns: float = 0.0
    """YaRN: pairs that turn less often are divided by the whole factor."""
    attention_factor: float = 1.0
    """YaRN: factor of the rotary embedding."""
    whole_pairs: bool = True
    """YaRN: the two limits are rounded to whole pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedRope:
    """The rotary embedding of the layers with a window, where it differs from that of the other layers."""

    theta: float | None = None
    """None: that of the other layers."""
    stretch: RopeStretch | None = None


def compute_yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Return the attention factor that YaRN's paper recommends (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Every number that defines a model."""

    vocab_size: int
    """Rows of the embedding; 0 in a preset that leaves them to the tokenizer."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of one attention head."""
    rope_theta: float
    rope_stretch: RopeStretch | None = None
    max_positions: int
    """Longest sequence that the model is designed for."""
    norm_eps: float
    tie_embeddings: bool
    initial_std: float = 0.02
    vocab_padding: int = 0
    """Rows at the end of the vocabulary without a token, so that tensor-parallel ranks hold equal parts."""
    family: str = "llama"
    """A key of `families.FAMILIES`."""
    attention_bias: bool = False
    """Biases of the projections to queries, keys and values."""
    output_bias: bool = False
    """Whether the projection after attention has a bias."""
    mlp_bias: bool = False
    query_key_norm: QueryKeyNorm = QueryKeyNorm.NONE
    norm_placement: NormPlacement = NormPlacement.INPUTS
    has_centered_norms: bool = False
    """Whether norms multiply by one plus their weight."""
    activation: Activation = Activation.SILU
    sliding_window: int | None = None
    """Positions that a token attends to, its own included, in the layers of `windowed`; None: all earlier ones."""
    windowed: tuple[bool, ...] = (True,)
    """Which layers have the window, repeated over the layers."""
    rotated: tuple[bool, ...] = (True,)
    """Which layers have the rotary embedding, repeated over the layers."""
    windowed_rope: WindowedRope | None = None
    """The rotary embedding of the layers with the window; None: that of the other layers."""
    query_growth: float | None = None
    """Queries at position p are multiplied by 1 + this x ln(1 + floor(p / original positions of the stretch))."""
    has_scaled_embedding: bool = False
    """Whether embeddings are multiplied by the root of `hidden_size`."""
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    """Factor of the attention scores; None: the inverse root of `head_dim`."""
    residual_multiplier: float = 1.0
    """Factor of the output of each branch."""
    logits_divisor: float = 1.0

    @property
    def longest_sequence(self) -> int:
        """Return the longest sequence in tokens; a dynamic scaling and YaRN go beyond the positions of training."""
        stretch = self.rope_stretch
        if stretch is None or stretch.kind not in (RopeScalingKind.DYNAMIC, RopeScalingKind.YARN):
            return self.max_positions
        # A dynamic scaling has no original positions. YaRN's factor is also of files that keep the shorter maximum.
        return max(self.max_positions, int((stretch.original_max_positions or self.max_positions) * stretch.factor))

    def window_size(self, layer: int) -> int | None:
        """Return the window of a layer; None if a token attends to all earlier ones."""
        return self.sliding_window if self.windowed[layer % len(self.windowed)] else None

    def is_rotated(self, layer: int) -> bool:
        """Return whether a layer has the rotary embedding."""
        return self.rotated[layer % len(self.rotated)]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for digests, logs and checkpoints."""
        values = _select_fields_to_write(self, {"rope_stretch", "initial_std"})
        values |= {name: list(values[name]) for name in _PATTERNS if name in values}
        if self.rope_stretch is not None:
            values["rope_stretch"] = _select_fields_to_write(self.rope_stretch, _ALWAYS_OF_STRETCH)
        if (windowed := self.windowed_rope) is not None:
            stretch = windowed.stretch and _select_fields_to_write(windowed.stretch, _ALWAYS_OF_STRETCH)
            values["windowed_rope"] = {"theta": windowed.theta, "stretch": stretch}
        return values

    @staticmethod
    def from_json(values: dict[str, Any]) -> ModelShape:
        """Return the reverse of `to_json`, after JSON or not. Raises TypeError or ValueError for anything else."""
        if not isinstance(values, dict):
            raise TypeError(f"{values!r} is not a model's shape")
        parsed: dict[str, Any] = {name: tuple(values[name]) for name in _PATTERNS if name in values}
        parsed |= {name: kind(values[name]) for name, kind in _ENUMS.items() if name in values}
        if "windowed_rope" in values:
            stretch = _parse_stretch(values["windowed_rope"]["stretch"])
            parsed["windowed_rope"] = WindowedRope(theta=values["windowed_rope"]["theta"], stretch=stretch)
        return ModelShape(**values | parsed | {"rope_stretch": _parse_stretch(values.get("rope_stretch"))})


_PATTERNS = ("windowed", "rotated")
_ENUMS = {"query_key_norm": QueryKeyNorm, "norm_placement": NormPlacement, "activation": Activation}
_ALWAYS_OF_STRETCH = {"low_frequency_factor", "high_frequency_factor", "original_max_positions"}


def _parse_stretch(values: dict[str, Any] | None) -> RopeStretch | None:
    return None if values is None else RopeStretch(**values | {"kind": RopeScalingKind(values["kind"])})


def _select_fields_to_write(instance: ModelShape | RopeStretch, always: set[str]) -> dict[str, Any]:
    """Return the fields by name; of those with a default only differing ones, and those in `always`."""
    values = {field.name: getattr(instance, field.name) for field in fields(instance)}
    return {
        field.name: values[field.name]
        for field in fields(instance)
        if field.default is MISSING or field.name in always or values[field.name] != field.default
    }
