"""PURE. Qwen3: Llama that normalizes each head of queries and keys, with a head width apart from the hidden size."""

from __future__ import annotations

from dataclasses import replace

from trainium_contract.models.family import Family, bias_traits, optional_window_fields, optional_window_traits
from trainium_contract.models.shape import ModelShape, QueryKeyNorm

_QWEN3_8B = ModelShape(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=1_000_000.0,
    max_positions=40_960,
    norm_eps=1e-6,
    tie_embeddings=False,
    query_key_norm=QueryKeyNorm.EACH_HEAD,
)
_QWEN3_06B = replace(
    _QWEN3_8B,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_attention_heads=16,
    tie_embeddings=True,
)

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={
        "attention_bias": False,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    traits=lambda config: (
        {"query_key_norm": QueryKeyNorm.EACH_HEAD} | bias_traits(config) | optional_window_traits(config)
    ),
    fields=lambda shape: {"attention_bias": shape.attention_bias} | optional_window_fields(shape),
    presets={
        "Qwen3-0.6B": _QWEN3_06B,
        "Qwen3-1.7B": replace(_QWEN3_06B, hidden_size=2048, intermediate_size=6144),
        "Qwen3-4B": replace(_QWEN3_8B, hidden_size=2560, intermediate_size=9728, tie_embeddings=True),
        "Qwen3-8B": _QWEN3_8B,
        "Qwen3-14B": replace(
            _QWEN3_8B, hidden_size=5120, intermediate_size=17_408, num_layers=40, num_attention_heads=40
        ),
        "Qwen3-32B": replace(
            _QWEN3_8B, hidden_size=5120, intermediate_size=25_600, num_layers=64, num_attention_heads=64
        ),
    },
)
