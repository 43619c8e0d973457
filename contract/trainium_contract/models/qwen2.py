"""Qwen2 and Qwen2.5: Llama with biases of query, key and value, and a window that may be switched on."""

from __future__ import annotations

from trainium_contract.models.family import Family, parse_presets, read_optional_window, write_optional_window

_QWEN25 = """
Qwen2.5-0.5B       151_936   896    4864  24  14  2   64  1_000_000   32_768  1e-6  tied
Qwen2.5-1.5B       151_936  1536    8960  28  12  2  128  1_000_000  131_072  1e-6  tied
Qwen2.5-3B         151_936  2048  11_008  36  16  2  128  1_000_000   32_768  1e-6  tied
Qwen2.5-7B         152_064  3584  18_944  28  28  4  128  1_000_000  131_072  1e-6  -
Qwen2.5-14B        152_064  5120  13_824  48  40  8  128  1_000_000  131_072  1e-5  -
Qwen2.5-32B        152_064  5120  27_648  64  40  8  128  1_000_000  131_072  1e-5  -
Qwen2.5-72B        152_064  8192  29_568  80  64  8  128  1_000_000  131_072  1e-5  -
"""

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
    traits=lambda config: {"attention_bias": True} | read_optional_window(config),
    fields=write_optional_window,
    presets=parse_presets("qwen2", _QWEN25, attention_bias=True),
)
