"""Qwen3: Llama that normalizes each head of queries and keys, with a head width apart from the hidden size."""

from __future__ import annotations

from trainium_contract.models.family import (
    Family,
    parse_presets,
    read_bias,
    read_optional_window,
    write_optional_window,
)
from trainium_contract.models.shape import QueryKeyNorm

_QWEN3 = """
Qwen3-0.6B         151_936  1024    3072  28  16  8  128  1_000_000  40_960  1e-6  tied
Qwen3-1.7B         151_936  2048    6144  28  16  8  128  1_000_000  40_960  1e-6  tied
Qwen3-4B           151_936  2560    9728  36  32  8  128  1_000_000  40_960  1e-6  tied
Qwen3-8B           151_936  4096  12_288  36  32  8  128  1_000_000  40_960  1e-6  -
Qwen3-14B          151_936  5120  17_408  40  40  8  128  1_000_000  40_960  1e-6  -
Qwen3-32B          151_936  5120  25_600  64  64  8  128  1_000_000  40_960  1e-6  -
"""

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
    traits=lambda config: {"query_key_norm": QueryKeyNorm.EACH_HEAD} | read_bias(config) | read_optional_window(config),
    fields=lambda shape: {"attention_bias": shape.attention_bias} | write_optional_window(shape),
    presets=parse_presets("qwen3", _QWEN3, query_key_norm=QueryKeyNorm.EACH_HEAD),
)
