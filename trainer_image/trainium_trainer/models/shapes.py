"""Llama shapes: every number that defines a model, and the presets.

Invariant: a `ModelShape` is complete; which one a configuration means is in `configuration/model_shape.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from trainium_contract.requirements.model_sizes import PRESET_SIZES
from trainium_contract.trainer.model import ModelPreset, RopeScalingKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeStretch:
    """Scaling of the rotary embedding; what `kind` does not use is left at 0."""

    kind: RopeScalingKind
    factor: float
    low_frequency_factor: float = 0.0
    high_frequency_factor: float = 0.0
    original_max_positions: int = 0


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
        """Return the reverse of `to_json`, after JSON or not. Raises TypeError or ValueError for anything else."""
        if not isinstance(values, dict):
            raise TypeError(f"{values!r} is not a model's shape")
        stretch = values.get("rope_stretch")
        if stretch is not None:
            stretch = RopeStretch(**stretch | {"kind": RopeScalingKind(stretch["kind"])})
        return ModelShape(**values | {"rope_stretch": stretch})


_LLAMA31_STRETCH = RopeStretch(
    kind=RopeScalingKind.LLAMA3,
    factor=8.0,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
    original_max_positions=8192,
)


def _shape(
    preset: ModelPreset, rope_theta: float, max_positions: int, stretch: RopeStretch | None = None
) -> ModelShape:
    """Return the preset's sizes with its rotary settings."""
    sizes = PRESET_SIZES[preset]
    return ModelShape(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head_width,
        rope_theta=rope_theta,
        rope_stretch=stretch,
        max_positions=max_positions,
        norm_eps=1e-5,
        tie_embeddings=sizes.tied,
    )


_POSITIONS: dict[ModelPreset, tuple[float, int, RopeStretch | None]] = {
    ModelPreset.TINY: (10_000.0, 8192, None),
    ModelPreset.SMALL: (10_000.0, 8192, None),
    ModelPreset.LLAMA2_7B: (10_000.0, 4096, None),
    ModelPreset.LLAMA2_13B: (10_000.0, 4096, None),
    ModelPreset.LLAMA2_70B: (10_000.0, 4096, None),
    ModelPreset.LLAMA3_8B: (500_000.0, 8192, None),
    ModelPreset.LLAMA3_70B: (500_000.0, 8192, None),
    ModelPreset.LLAMA31_8B: (500_000.0, 131_072, _LLAMA31_STRETCH),
    ModelPreset.LLAMA31_70B: (500_000.0, 131_072, _LLAMA31_STRETCH),
    ModelPreset.LLAMA32_1B: (500_000.0, 131_072, replace(_LLAMA31_STRETCH, factor=32.0)),
}
"""Base of the rotary embedding, longest sequence, scaling."""
PRESETS = {preset: _shape(preset, *positions) for preset, positions in _POSITIONS.items()}
"""Published shapes (the models' own `config.json`); a vocabulary of 0 stands for the tokenizer's."""
