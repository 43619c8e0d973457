"""PURE. Mistral: Llama whose layers may see a window of the latest positions only."""

from __future__ import annotations

from dataclasses import replace

from trainium_contract.models.family import Family
from trainium_contract.models.shape import ModelShape

_V01 = ModelShape(
    family="mistral",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=10_000.0,
    max_positions=32_768,
    norm_eps=1e-5,
    tie_embeddings=False,
    sliding_window=4096,
)
_V03 = replace(_V01, vocab_size=32_768, rope_theta=1_000_000.0, sliding_window=None)

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
    traits=lambda config: {"sliding_window": config["sliding_window"]},
    fields=lambda shape: {"sliding_window": shape.sliding_window},
    presets={
        "Mistral-7B-v0.1": _V01,
        "Mistral-7B-v0.3": _V03,
        "Mistral-Nemo-12B": replace(_V03, vocab_size=131_072, hidden_size=5120, num_layers=40, max_positions=131_072),
    },
)
