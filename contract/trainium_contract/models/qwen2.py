"""PURE. Qwen2 and Qwen2.5: Llama with biases of query, key and value, and a window that may be switched on."""

from __future__ import annotations

from dataclasses import replace

from trainium_contract.models.family import Family, optional_window_fields, optional_window_traits
from trainium_contract.models.shape import ModelShape

_QWEN25_7B = ModelShape(
    family="qwen2",
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    rope_theta=1_000_000.0,
    max_positions=131_072,
    norm_eps=1e-6,
    tie_embeddings=False,
    attention_bias=True,
)
_QWEN25_05B = replace(
    _QWEN25_7B,
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    max_positions=32_768,
    tie_embeddings=True,
)
_QWEN25_32B = replace(
    _QWEN25_7B,
    hidden_size=5120,
    intermediate_size=27_648,
    num_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    norm_eps=1e-5,
)

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    traits=lambda config: {"attention_bias": True} | optional_window_traits(config),
    fields=optional_window_fields,
    presets={
        "Qwen2.5-0.5B": _QWEN25_05B,
        "Qwen2.5-1.5B": replace(
            _QWEN25_05B,
            hidden_size=1536,
            intermediate_size=8960,
            num_layers=28,
            num_attention_heads=12,
            head_dim=128,
            max_positions=131_072,
        ),
        "Qwen2.5-3B": replace(
            _QWEN25_05B,
            hidden_size=2048,
            intermediate_size=11_008,
            num_layers=36,
            num_attention_heads=16,
            head_dim=128,
        ),
        "Qwen2.5-7B": _QWEN25_7B,
        "Qwen2.5-14B": replace(_QWEN25_32B, intermediate_size=13_824, num_layers=48),
        "Qwen2.5-32B": _QWEN25_32B,
        "Qwen2.5-72B": replace(
            _QWEN25_32B, hidden_size=8192, intermediate_size=29_568, num_layers=80, num_attention_heads=64
        ),
    },
)
