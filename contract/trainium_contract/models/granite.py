"""PURE. Granite: Llama with multipliers of embedding, residual branches, attention scores and logits."""

from __future__ import annotations

from dataclasses import replace

from trainium_contract.models.family import BIASES, Family, bias_fields, bias_traits
from trainium_contract.models.shape import ModelShape

_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_divisor",
}
"""Fields of `config.json` and of the shape."""
_GRANITE33_2B = ModelShape(
    family="granite",
    vocab_size=49_159,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=40,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    rope_theta=10_000_000.0,
    max_positions=131_072,
    norm_eps=1e-5,
    tie_embeddings=True,
    embedding_multiplier=12.0,
    attention_multiplier=0.015625,
    residual_multiplier=0.22,
    logits_divisor=8.0,
)

FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults={**BIASES, **dict.fromkeys(_MULTIPLIERS, 1.0)},
    traits=lambda config: bias_traits(config) | {ours: config[theirs] for theirs, ours in _MULTIPLIERS.items()},
    fields=lambda shape: bias_fields(shape) | {theirs: getattr(shape, ours) for theirs, ours in _MULTIPLIERS.items()},
    presets={
        "Granite3.3-2B": _GRANITE33_2B,
        "Granite3.3-8B": replace(
            _GRANITE33_2B,
            hidden_size=4096,
            intermediate_size=12_800,
            head_dim=128,
            attention_multiplier=0.0078125,
            logits_divisor=16.0,
        ),
    },
)
