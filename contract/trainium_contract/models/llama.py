"""PURE. Llama: the presets (the models' own `config.json`) and two small shapes for a CPU."""

from __future__ import annotations

from dataclasses import replace

from trainium_contract.models.family import BIASES, Family, bias_fields, bias_traits
from trainium_contract.models.shape import ModelShape, RopeScalingKind, RopeStretch

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
_LLAMA3_70B = replace(_LLAMA3_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_attention_heads=64)
_STRETCH = RopeStretch(
    kind=RopeScalingKind.LLAMA3,
    factor=8.0,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
    original_max_positions=8192,
)
_LLAMA31_8B = replace(_LLAMA3_8B, rope_stretch=_STRETCH, max_positions=131_072)
FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults=BIASES,
    traits=bias_traits,
    fields=bias_fields,
    presets={
        "Tiny": _TINY,
        "Small": replace(
            _TINY,
            hidden_size=384,
            intermediate_size=1024,
            num_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=48,
        ),
        "Llama2-7B": _LLAMA2_7B,
        "Llama2-13B": replace(
            _LLAMA2_7B,
            hidden_size=5120,
            intermediate_size=13_824,
            num_layers=40,
            num_attention_heads=40,
            num_key_value_heads=40,
        ),
        "Llama2-70B": replace(_LLAMA3_70B, vocab_size=32_000, rope_theta=10_000.0, max_positions=4096),
        "Llama3-8B": _LLAMA3_8B,
        "Llama3-70B": _LLAMA3_70B,
        "Llama3.1-8B": _LLAMA31_8B,
        "Llama3.1-70B": replace(_LLAMA3_70B, rope_stretch=_STRETCH, max_positions=131_072),
        "Llama3.2-1B": replace(
            _LLAMA31_8B,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            head_dim=64,
            tie_embeddings=True,
            rope_stretch=replace(_STRETCH, factor=32.0),
        ),
    },
)
