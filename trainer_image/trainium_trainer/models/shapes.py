"""Llama shapes: every number that defines a model, and the presets.

Invariant: a `ModelShape` is complete; which one a configuration means is in `configuration/model_shape.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from trainium_contract.trainer.model import ModelPreset, RopeScalingKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeStretch:
    """Scaling of the rotary embedding; what `kind` does not use is left at 0."""

    kind: RopeScalingKind
    factor: float
    low_frequency_factor: float = 0.0
    high_frequency_factor: float = 0.0
    original_max_positions: int = 0


INITIAL_VERSION = 2
"""How a fresh start draws its weights: `models.initial`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Every number that defines a Llama model."""

    vocab_size: int
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
    """Longest sequence that the model is meant for."""
    norm_eps: float
    tie_embeddings: bool
    initial_std: float = 0.02
    vocab_padding: int = 0
    """Rows at the end of the vocabulary that no token has, so that tensor-parallel ranks hold equal parts."""

    @property
    def num_parameters(self) -> int:
        """Trainable numbers of the whole model."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """Plain values, for digests, logs and checkpoints."""
        values = asdict(self)
        if not self.vocab_padding:
            del values["vocab_padding"]  # digests of older checkpoints know nothing of it
        return values

    @staticmethod
    def from_json(values: dict[str, Any]) -> ModelShape:
        """The reverse of `to_json`, after JSON or not. Raises TypeError or ValueError for anything else."""
        if not isinstance(values, dict):
            raise TypeError(f"{values!r} is not a model's shape")
        stretch = values.get("rope_stretch")
        if stretch is not None:
            stretch = RopeStretch(**stretch | {"kind": RopeScalingKind(stretch["kind"])})
        return ModelShape(**values | {"rope_stretch": stretch})


_TINY = ModelShape(
    vocab_size=0,
    hidden_size=96,
    intermediate_size=256,
    num_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    rope_theta=10_000.0,
    max_positions=8192,
    norm_eps=1e-5,
    tie_embeddings=True,
)
_LLAMA2_7B = ModelShape(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    rope_theta=10_000.0,
    max_positions=4096,
    norm_eps=1e-5,
    tie_embeddings=False,
)
_LLAMA3_8B = replace(
    _LLAMA2_7B,
    vocab_size=128_256,
    intermediate_size=14_336,
    num_key_value_heads=8,
    rope_theta=500_000.0,
    max_positions=8192,
)
_LLAMA3_70B = replace(
    _LLAMA3_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_attention_heads=64, num_key_value_heads=8
)
_LLAMA31_STRETCH = RopeStretch(
    kind=RopeScalingKind.LLAMA3,
    factor=8.0,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
    original_max_positions=8192,
)
PRESETS: dict[ModelPreset, ModelShape] = {
    ModelPreset.TINY: _TINY,
    ModelPreset.SMALL: replace(
        _TINY,
        hidden_size=384,
        intermediate_size=1024,
        num_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=48,
    ),
    ModelPreset.LLAMA2_7B: _LLAMA2_7B,
    ModelPreset.LLAMA2_13B: replace(
        _LLAMA2_7B,
        hidden_size=5120,
        intermediate_size=13_824,
        num_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
    ),
    ModelPreset.LLAMA2_70B: replace(_LLAMA3_70B, vocab_size=32_000, rope_theta=10_000.0, max_positions=4096),
    ModelPreset.LLAMA3_8B: _LLAMA3_8B,
    ModelPreset.LLAMA3_70B: _LLAMA3_70B,
    ModelPreset.LLAMA31_8B: replace(_LLAMA3_8B, max_positions=131_072, rope_stretch=_LLAMA31_STRETCH),
    ModelPreset.LLAMA31_70B: replace(_LLAMA3_70B, max_positions=131_072, rope_stretch=_LLAMA31_STRETCH),
    ModelPreset.LLAMA32_1B: replace(
        _LLAMA3_8B,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        tie_embeddings=True,
        max_positions=131_072,
        rope_stretch=replace(_LLAMA31_STRETCH, factor=32.0),
    ),
}
"""Published shapes (the models' own `config.json`); a vocabulary of 0 stands for the tokenizer's."""
