"""Granite: Llama with multipliers of embedding, residual branches, attention scores and logits."""

from __future__ import annotations

from trainium_contract.models.family import BIASES, Family, parse_presets, read_bias, write_bias

_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_divisor",
}
"""Fields of `config.json` and of the shape."""
_2B = "Granite3.3-2B  49_159  2048  8192  40  32  8  64  10_000_000  131_072  1e-5  tied"
_8B = "Granite3.3-8B  49_159  4096  12_800  40  32  8  128  10_000_000  131_072  1e-5  tied"
_SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}

FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults={**BIASES, **dict.fromkeys(_MULTIPLIERS, 1.0)},
    traits=lambda config: read_bias(config) | {ours: config[theirs] for theirs, ours in _MULTIPLIERS.items()},
    fields=lambda shape: write_bias(shape) | {theirs: getattr(shape, ours) for theirs, ours in _MULTIPLIERS.items()},
    presets={
        **parse_presets("granite", _2B, attention_multiplier=1 / 64, logits_divisor=8.0, **_SCALES),
        **parse_presets("granite", _8B, attention_multiplier=1 / 128, logits_divisor=16.0, **_SCALES),
    },
)
